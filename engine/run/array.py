"""Several runs as one array of SLURM: each a run of its own, in its own folder, under one number in the cluster's queue."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.config.facts import Facts
from engine.config.tree import RunConfig
from engine.errors import UsageError
from engine.run import slurm
from engine.run.from_config import launch_config, refuse_shared_repository
from engine.run.store import RunFolder, slug


@dataclass(frozen=True)
class Task:
    """A run of an array before it is made. `description` tells it from the others; `forecast` is what its checkpoints take, in bytes;
    `more` stands in its run.json."""

    file: Path
    description: str
    config: RunConfig
    facts: Facts
    place: Path
    forecast: int | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What the run is called, before its number."""
        return slug(self.config.run.name or self.file.stem)


def require_alike(tasks: Sequence[Task]) -> None:
    """Raises UsageError where two are one and the same run, or want different numbers of machines, which an array gives to all alike."""
    known: dict[str, Task] = {}
    for task in tasks:
        same = known.setdefault(repr(task.config), task)
        if same is not task:
            raise UsageError(
                f"{task.description} and {same.description} are one and the same config.", "Leave one out."
            )
        wanted, first = task.config.distributed.nodes, tasks[0].config.distributed.nodes
        if wanted != first:
            raise UsageError(
                f"distributed.nodes: must be the same for all runs of an array; {tasks[0].description} has {first}, {task.description} has {wanted}.",
                "Submit them apart.",
            )


def script(
    tasks: Sequence[Task], name: str, job: slurm.Job, limit: int | None, folders: Sequence[Path] | None = None
) -> str:
    """The array's script. Without `folders` that of a dry run: the number of each run is not known yet."""
    places = folders or [task.place / f"{task.name}-NNNN" for task in tasks]
    rows = [(place, task.description) for place, task in zip(places, tasks, strict=True)]
    grace = max(task.config.run.grace_seconds for task in tasks)
    return slurm.array_script(rows, name, job, grace, tasks[0].config.distributed.nodes, limit)


def submit(tasks: Sequence[Task], name: str, job: slurm.Job, limit: int | None) -> tuple[list[RunFolder], str]:
    """Make a run of each and hand all of them over at once; the runs and the number of the array.

    Raises WorkbenchError, with nothing left behind, where one cannot be made or sbatch refuses.
    """
    refuse_shared_repository(task.config for task in tasks)
    job = replace(job, array=True)
    made: list[RunFolder] = []
    try:
        for task in tasks:
            run = launch_config(
                task.config, task.facts, runs_dir=task.place, name=task.file.stem, forecast_bytes=task.forecast,
                source=task.file, more=task.more, job=job,
            )  # fmt: skip
            made.append(run)
        number = slurm.submit_array(made, script(tasks, name, job, limit, [run.path for run in made]))
    except BaseException:
        for run in made:
            shutil.rmtree(run.path)
        raise
    return made, number
