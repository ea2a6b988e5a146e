"""`workbench stop RUN`: three ways to stop, each saying what it keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from engine.errors import UsageError, WorkbenchError
from engine.run import checkpoint, store
from engine.run.index import peek
from engine.run.stop_requests import LONG_STEP_SECONDS
from engine.run.store import RunFolder
from engine.run.view import RunView
from workbench.calling import run_name
from workbench.cli.asking import ask
from workbench.cli.following import state_text, summary
from workbench.cli.output import echo, print_json


@click.command(short_help="Ask a run to stop.")
@click.argument("run")
@click.option("--save", is_flag=True, help="Save a checkpoint first; nothing is lost.")
@click.option("--end-of-epoch", is_flag=True, help="Stop at the end of this epoch, with a checkpoint.")
@click.option("--now", is_flag=True, help="End the process at once, also when it hangs.")
@click.option("--runs", "runs", metavar="DIR", help="Folder that holds the runs.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def command(run: str, save: bool, end_of_epoch: bool, now: bool, runs: str | None, as_json: bool) -> int:
    """Stop a run after its current step. Checkpoints made so far are kept; steps after the newest one are lost.

    With --save it writes a checkpoint first; a step that takes long is waited for while the worker computes, for half an
    hour. A run that does not answer within run.grace_seconds is ended.
    """
    if save + end_of_epoch + now > 1:
        raise UsageError("--save, --end-of-epoch and --now exclude each other; choose one.")
    folder = store.find(run, store.runs_dir(runs))
    view, kept = stop(folder, "save_stop" if save else "end_of_epoch" if end_of_epoch else "stop", now=now)
    step = checkpoint.step_of(kept) if kept else None
    if as_json:
        print_json(summary(peek(folder)) | {"checkpoint": str(kept) if kept else None})
        return 0
    if view.state in ("failed", "lost"):
        raise WorkbenchError(f"{folder.id} {view.state} while it was stopping: {view.cause}")
    on = f"Kept: the checkpoint of step {step}" if kept else "Kept: no checkpoint"
    # A run that came to its end before it was asked has nothing left to go on with.
    on += f"; `workbench resume {run_name(folder)}` goes on from it." if kept and view.state != "finished" else "."
    echo(f"{state_text(view.state)} at step {view.step}: {folder.id}. {on}")
    return 0


def stop(folder: RunFolder, do: str, *, now: bool = False, **how: Any) -> tuple[RunView, Path | None]:
    """Ask a run to stop in this way, and wait for its end: the run then, and its newest whole checkpoint. `how` is for `ask`.

    Raises WorkbenchError where it cannot be asked, or does not answer.
    """
    grace = folder.read_json().get("grace_seconds")
    seconds = grace if isinstance(grace, (int, float)) else 60
    patience = 2.0 * seconds + (LONG_STEP_SECONDS if do == "save_stop" else 30)
    view = ask(folder, do, now=now, patience=86_400 if do == "end_of_epoch" else patience, **how)
    return view, checkpoint.newest_valid(folder, hashes=False)[0]
