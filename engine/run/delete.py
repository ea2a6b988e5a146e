"""Deleting a run: only a folder that is one, only when nothing works in it, and never through a link."""

from __future__ import annotations

import os
import secrets
import shutil

from engine.errors import RunBusy, WorkbenchError
from engine.run import slurm
from engine.run.lock import is_held
from engine.run.store import ENDED, RunFolder, is_run


def delete(run: RunFolder) -> None:
    """Takes the run's name away in one step, then its files. Raises RunBusy while it is alive."""
    if run.path.is_symlink() or not is_run(run.path):
        raise WorkbenchError(f"{run.id}: is not a run folder, so nothing is deleted.")
    if slurm.is_job(run) and (state := slurm.refresh(run)) not in ENDED:
        raise RunBusy(f"run {run.id} is {state} as job {slurm.number(run) or '?'} of SLURM.", "Stop it first.")
    if is_held(run):
        raise RunBusy(f"run {run.id} is still at work.", "Stop it first.")
    # Its tree is removed descriptor by descriptor: no link in it is followed.
    trash = run.path.with_name(f".trash-{run.id}-{secrets.token_hex(4)}")
    try:
        os.rename(run.path, trash)
        shutil.rmtree(trash)
    except OSError as problem:
        raise WorkbenchError(f"run {run.id} cannot be deleted: {problem.strerror}.") from problem
