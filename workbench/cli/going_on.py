"""Going on with a run, told as it happens: what `resume` and `train --resume` share."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import WorkbenchError, visible
from engine.run import checkpoint, launch, slurm
from engine.run.nodes import Rendezvous, rendezvous_of, require_place
from engine.run.store import ENDED, RunFolder
from engine.session import going_on
from engine.session.resume import resume
from workbench.calling import run_name
from workbench.cli.output import echo
from workbench.cli.places import shown


def go_on(
    folder: RunFolder,
    meeting: Rendezvous | None,
    *,
    settings: Mapping[str, Any] | None = None,
    accept_data: bool = False,
) -> None:
    """Resume the run, and say from where. Raises WorkbenchError where it cannot go on."""
    if rendezvous_of(folder).nodes > 1 and not launch.at_work(folder) and not slurm.is_job(folder):
        require_place(meeting or rendezvous_of(folder), 0, os.environ)
    if meeting is not None and not launch.at_work(folder):
        folder.update_json(rendezvous=meeting.as_json())
    newest, skipped = resume(folder, settings=settings, accept_data=accept_data)
    for path, reason in skipped:
        echo(f"skipped {path.name}: {reason}", err=True)
    place = f"step {checkpoint.step_of(newest)} ({newest.name})" if newest else "the beginning: no checkpoint is whole"
    echo(f"{folder.id} goes on from {place}", err=True)


def report_versions(folder: RunFolder) -> None:
    """Other versions can mean other numbers: they are said, and stop nothing."""
    before = folder.read_json().get("versions")
    now = launch.versions()
    if isinstance(before, dict):
        for package, version in sorted(before.items()):
            if now.get(package) != version:
                echo(f"note: {package} was {version}, is {now.get(package)}", err=True)


def begun_by(file: Path, overrides: tuple[str, ...], runs: str | None, rank: int) -> RunFolder | None:
    """The newest run that this file began, its processes gone; None where there is none. On another node than the first (`rank`
    above 0) one that stays as it is alone, since the first goes on with any other. Raises WorkbenchError where it has another
    config, or is at work."""
    from engine.config.files import load
    from engine.rules import read
    from engine.run.from_config import runs_dir_of
    from workbench.cli.reading import with_overrides

    reading = read(with_overrides(load(file).mapping, file.resolve().parent, overrides))
    place = runs_dir_of(reading.config, reading.given, runs)
    folder = going_on.begun_by(place, file)
    if rank > 0:
        return folder if folder is not None and folder.state in ENDED and going_on.stays(folder) else None
    if folder is None:
        echo(f"no run of {shown(file)} is in {shown(place)}: one is started", err=True)
        return None
    if differences := going_on.differences(folder, reading.config):
        for line in differences:
            echo(f"changed: {visible(line)}", err=True)
        name = run_name(folder)
        raise WorkbenchError(
            f"{visible(str(file))}: its run {folder.id} has another config, see above.",
            f"Give the same one, or `workbench resume {name} --set KEY=VALUE`; without --resume a new run starts.",
        )
    going_on.wait_until_free(folder)
    return folder


def stays(folder: RunFolder) -> bool:
    """Whether the run does not go on by itself, which is said."""
    if not (why := going_on.stays(folder)):
        return False
    todo = "" if folder.state == "finished" else f"; `workbench resume {run_name(folder)}` goes on with it"
    echo(f"{folder.id} {why}; nothing is started{todo}", err=True)
    return True
