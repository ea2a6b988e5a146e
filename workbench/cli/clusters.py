"""What commands that hand runs over to a cluster share: their options, the checks, one array of several runs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from engine.errors import UsageError, WorkbenchError, redact, visible
from engine.figures import size
from engine.run import array, slurm
from workbench.cli.output import echo, print_json

if TYPE_CHECKING:
    from engine.config.facts import Facts
    from engine.config.reading import Reading
    from engine.run.array import Task
    from engine.run.store import RunFolder

Command = TypeVar("Command", bound=Callable[..., Any])
_NAMED = ("time", "partition", "account", "qos", "gres", "mem", "cpus-per-task")


def cluster_options(command: Command) -> Command:
    """The options with which a cluster is asked for machines."""
    for option in (
        click.option("--dry-run", is_flag=True, help="Print the script; nothing is made or submitted."),
        click.option(
            "--for", "machine", metavar="MACHINE", help="Check for the cluster's machine, such as 2xH100-80GB."
        ),
        click.option(
            "--array-limit", type=click.IntRange(1), metavar="N", help="Of several runs, how many work at a time."
        ),
        click.option("--nodes", type=click.IntRange(1, 1024), metavar="N", help="Machines; sets distributed.nodes."),
        click.option(
            "--sbatch", "more", multiple=True, metavar="OPTION", help="Any other option of sbatch; repeatable."
        ),
        click.option("--cpus-per-task", metavar="N", help="CPU cores."),
        click.option("--mem", metavar="SIZE", help="The machine's memory, such as 64G."),
        click.option("--gres", metavar="LIST", help="Generic resources: gpu:2, as many GPUs as run.devices says."),
        click.option("--qos", metavar="NAME", help="The quality of service."),
        click.option("--account", metavar="NAME", help="The account that is charged."),
        click.option("--partition", metavar="NAME", help="The partition."),
        click.option("--time", "time", metavar="TIME", help="The job's time limit, as sbatch takes it: 4:00:00."),
    ):
        command = option(command)
    return command


def job_of(named: Mapping[str, str | None], more: tuple[str, ...]) -> slurm.Job:
    """What sbatch is called with. Raises UsageError for what it could not take."""
    chosen = {name: value for name in _NAMED if (value := named[name.replace("-", "_")]) is not None}
    for name, value in chosen.items():
        if not (value and value.isprintable() and " " not in value):
            raise UsageError(f"--{name}: must be one word; got {visible(value)!r}.")
    slurm.require_options(more)
    return slurm.Job((*(f"--{name}={value}" for name, value in chosen.items()), *more))


def checked(
    file: Path, overrides: Sequence[str], machine: str | None, title: str, reported: set[str] | None = None
) -> tuple[Reading, Facts]:
    """The config as it was read, and the facts that it was judged by; findings that were `reported` are not shown again.

    Raises ConfigRefused where the rules refuse it.
    """
    from engine.data.gather_facts import gather_facts
    from engine.hardware import parse_machine
    from engine.rules import read
    from workbench.cli.findings import require_no_errors
    from workbench.cli.reading import load_own, with_overrides

    complete = with_overrides(load_own(file).mapping, file.resolve().parent, overrides)
    target = parse_machine(machine) if machine else None
    facts = gather_facts(read(complete).config, machine=target)
    if target is None:
        # This machine's hardware says nothing about the cluster's.
        facts = replace(facts, machine=None)
    reading = read(complete, facts)
    known = reported if reported is not None else set()
    fresh = [each for each in reading.findings if each.severity == "error" or each.message not in known]
    known.update(each.message for each in fresh)
    require_no_errors(fresh, title, "no run was submitted")
    return reading, facts


def tasks_of(
    asked: Iterable[tuple[Path, Sequence[str], str, str]], machine: str | None, runs: str | None
) -> list[Task]:
    """A checked task for each file with its overrides, its name in a refusal and the words that tell it from the others.

    Raises WorkbenchError where one is refused, two are alike or the disk has no room for all.
    """
    from engine.planning.estimate import estimate
    from engine.run.array import Task, require_alike
    from engine.run.from_config import runs_dir_of

    tasks: list[Task] = []
    reported: set[str] = set()
    for file, overrides, title, words in asked:
        reading, facts = checked(file, overrides, machine, title, reported)
        config, place = reading.config, runs_dir_of(reading.config, reading.given, runs)
        tasks.append(Task(file, words, config, facts, place, estimate(config, facts).checkpoints_bytes))
    require_alike(tasks)
    for place in dict.fromkeys(task.place for task in tasks):
        there = [task for task in tasks if task.place == place]
        require_room(place, sum(task.forecast or 0 for task in there), len(there), "submitted")
    return tasks


def hand_over(tasks: Sequence[Task], name: str, job: slurm.Job, limit: int | None) -> tuple[list[RunFolder], str]:
    """Submit all as one array; the runs and its number. Raises WorkbenchError with nothing left behind."""
    from engine.planning.estimate import estimate
    from engine.session.paragraph import paragraph

    slurm.require_scheduler()
    first = tasks[0]
    echo(paragraph(first.config, first.facts, estimate(first.config, first.facts), first.place), err=True, hang=0)
    made, number = array.submit(tasks, name, job, limit)
    for run in made:
        slurm.refresh(run)
    return made, number


def show_script(text: str, *, as_json: bool) -> int:
    """Print the script of a dry run."""
    print_json({"dry_run": True, "script": text}) if as_json else echo(text.rstrip("\n"), lines=True)
    return 0


def at_a_time(limit: int | None) -> str:
    """How many runs of an array work at once, as the end of a sentence."""
    return f", at most {limit} at a time" if limit is not None else ""


def require_room(place: Path, needed: int, many: int, done: str) -> None:
    """Each launch looks at its own need; together they may need more than there is. Raises WorkbenchError."""
    there = next(folder for folder in (place, *place.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise WorkbenchError(
            f"{visible(redact(str(place)))}: the disk has {size(free)} free, and {many} runs are expected to need "
            f"{size(needed)}; no run was {done}.",
            "Keep fewer checkpoints, name fewer values, or choose another folder with --runs.",
        )
