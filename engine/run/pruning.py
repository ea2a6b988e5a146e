"""Removing checkpoints of a run that has ended: never the newest whole one, never the best.

The log of a run ends with its last word, which others read off its last line, so what is removed afterwards is noted in
`pruned.json` beside it. A step that stands there and whose folder is there again was saved anew by a resumed run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from engine.errors import RunBusy, WorkbenchError, visible
from engine.run import checkpoint, inside, launch
from engine.run.lock import RunLock
from engine.run.store import RunFolder

PRUNED = "pruned.json"
_MOST = 1 << 20


@dataclass(frozen=True)
class Plan:
    """What stays and what goes, each the newest first."""

    stay: list[Path]
    go: list[Path]


def plan(run: RunFolder, keep: int, best: int | None, *, hashes: bool = True) -> Plan:
    """All but the `keep` newest whole checkpoints and that of the step `best`; those that are not whole go as well. With
    `hashes` what stays as the newest is read whole.

    Raises RunBusy for a run that is at work, and WorkbenchError where no checkpoint is whole.
    """
    run.refuse_flaws()
    launch.settle(run)
    if launch.at_work(run):
        raise RunBusy(
            f"run {visible(run.id)} is still {run.state}, and removes older checkpoints itself.",
            "`run.save_total_limit` says how many it keeps; or wait until it has ended.",
        )
    if checkpoint.newest_valid(run, hashes=hashes)[0] is None:
        raise WorkbenchError(
            f"run {visible(run.id)} has no whole checkpoint, so nothing of it is removed.",
            "`workbench runs` lists the runs.",
        )
    go = checkpoint.to_delete(run, max(1, keep), best, hashes=hashes)
    return Plan([path for path in checkpoint.newest_first(run) if path not in go], go)


def carry_out(run: RunFolder, pruning: Plan) -> None:
    """Remove what goes; the run cannot begin to work meanwhile. Raises WorkbenchError where something cannot be removed."""
    with RunLock(run):
        try:
            steps = {checkpoint.step_of(path) for path in pruning.go} | pruned_steps(run)
            inside.replace(
                run, run.path / PRUNED, json.dumps({"steps": sorted(step for step in steps if step is not None)})
            )
            for path in pruning.go:
                checkpoint.discard(path)
        except OSError as problem:
            raise WorkbenchError(
                f"run {visible(run.id)}: its checkpoints cannot be removed: {problem.strerror or problem}."
            ) from problem


def pruned_steps(run: RunFolder) -> set[int]:
    """The steps whose checkpoints a person removed and that are not there again."""
    try:
        document = json.loads(inside.read(run, run.path / PRUNED, _MOST))
        steps = document["steps"] if isinstance(document, dict) else []
        return {
            step
            for step in steps
            if type(step) is int and not inside.exists(run, run.checkpoints / f"checkpoint-{step}")
        }
    except (OSError, ValueError, KeyError, TypeError, RecursionError, WorkbenchError):
        return set()
