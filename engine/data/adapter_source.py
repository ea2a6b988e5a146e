"""The adapter that a config goes on from, looked at where it lies: a folder, a checkpoint, or a run's newest whole one."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from engine.config.facts import AdapterFacts
from engine.config.tree import RunConfig
from engine.errors import WorkbenchError, visible
from engine.facts.adapters import adapter_facts
from engine.model_files import ADAPTER
from engine.run.checkpoint import newest_valid
from engine.run.store import ENDED, RunFolder, is_run


def named_adapter(config: RunConfig, folder: Path) -> AdapterFacts | None:
    """What is known of the adapter that `adapter.path` names, from the config's folder; None where it names none."""
    path = config.adapter.path if config.adapter.kind == "lora" else None
    if not path:
        return None
    place = Path(os.path.normpath(folder.absolute() / os.path.expanduser(path)))
    run = RunFolder(place)
    try:
        return adapter_facts(place, path) if (place / ADAPTER).is_file() or not is_run(place) else _of_run(run, path)
    except (WorkbenchError, OSError, ValueError) as problem:
        why = problem.strerror if isinstance(problem, OSError) else None
        return AdapterFacts(
            path, str(place), f"cannot be read: {why or visible(str(problem))}", "Name another adapter."
        )


def _of_run(run: RunFolder, path: str) -> AdapterFacts:
    """The adapter of a run's newest whole checkpoint, which the config writes as `path`."""
    run.refuse_flaws()
    newest, skipped = newest_valid(run, hashes=False)
    going, name = run.state not in ENDED, visible(run.id)
    if newest is None:
        why = f" ({skipped[0][0].name}: {skipped[0][1]})" if skipped else ""
        todo = "Wait for its first one, or name another adapter." if going else "Name another adapter."
        return AdapterFacts(path, str(run.path), f"the run {name} has no whole checkpoint{why}.", todo)
    notes = [
        f"{newest.name} of {name} is taken, since {each.name} is broken: {reason}." for each, reason in skipped[:1]
    ]
    if going:
        notes.append(
            f"the run {name} is still {run.state}, and deletes {newest.name} when newer ones come. Wait for its end, or name a "
            "copy of that folder."
        )
    return replace(adapter_facts(newest, path), note=" ".join(notes))
