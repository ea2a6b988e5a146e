"""Asking a run for something and waiting for its answer, for `stop` and `checkpoint`."""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.errors import WorkbenchError
from engine.run import control, launch
from engine.run.index import open_view
from engine.run.store import RunFolder
from engine.run.view import RunView
from workbench.calling import run_name
from workbench.cli.following import Follower
from workbench.cli.output import echo


def ask(
    run: RunFolder,
    do: str,
    *,
    now: bool = False,
    patience: float,
    by: str = "the command line",
    quiet: bool = False,
    leave: Callable[[], bool] = lambda: False,
) -> RunView:
    """Ask, and follow until the request is done, refused, or the run is over. Ctrl-C, and `leave` that says so, leave the request
    standing; `quiet` prints nothing meanwhile.

    Raises WorkbenchError when it is refused, or not answered within `patience` seconds.
    """
    launch.settle(run)
    if launch.unattended(run):
        launch.attend(run)
    id = control.request(run, do, by=by, now=now)
    give_up = time.monotonic() + patience
    stops = do != "checkpoint"

    def settled(view: RunView) -> bool:
        answer = control.answer(view, id)
        done = (
            answer is not None
            and answer["status"] in ("done", "refused")
            and not (stops and answer["status"] == "done")
        )
        return done or leave() or time.monotonic() > give_up

    with open_view(run) as watch:
        try:
            view = Follower(watch, quiet=quiet).until(settled).copy()
        except KeyboardInterrupt:
            raise _not_waited_for(run) from None
    if leave() and not view.over:
        raise _not_waited_for(run)
    answer = control.answer(view, id)
    if answer is not None and answer["status"] == "refused":
        raise WorkbenchError(f"{run.id} refused: {answer['message']}")
    if not view.over and (stops or answer is None or answer["status"] != "done"):
        raise WorkbenchError(
            f"{run.id} has not answered within {patience:.0f} s; the request stands.",
            f"`workbench stop --now {run_name(run)}` ends it at once; checkpoints made so far are kept."
            if stops
            else "",
        )
    if answer is not None and answer["message"] and not quiet:
        echo(answer["message"], err=True)
    return view


def _not_waited_for(run: RunFolder) -> WorkbenchError:
    return WorkbenchError(f"{run.id} was asked; its answer was not waited for.", exit_code=130)
