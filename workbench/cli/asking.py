"""Asking a run for something and waiting for its answer, for `stop` and `checkpoint`."""

from __future__ import annotations

import time

from engine.errors import WorkbenchError
from engine.run import control, launch
from engine.run.index import open_view
from engine.run.store import RunFolder
from engine.run.view import RunView
from workbench.calling import run_name
from workbench.cli.following import Follower
from workbench.cli.output import echo


def ask(run: RunFolder, do: str, *, now: bool = False, patience: float) -> RunView:
    """Ask, and follow until the request is done, refused, or the run is over. Ctrl-C leaves the request standing.

    Raises WorkbenchError when it is refused, or not answered within `patience` seconds.
    """
    launch.settle(run)
    if launch.unattended(run):
        launch.attend(run)
    id = control.request(run, do, by="the command line", now=now)
    give_up = time.monotonic() + patience
    stops = do != "checkpoint"

    def settled(view: RunView) -> bool:
        answer = control.answer(view, id)
        done = (
            answer is not None
            and answer["status"] in ("done", "refused")
            and not (stops and answer["status"] == "done")
        )
        return done or time.monotonic() > give_up

    with open_view(run) as watch:
        try:
            view = Follower(watch).until(settled).copy()
        except KeyboardInterrupt:
            raise WorkbenchError(f"{run.id} was asked; its answer was not waited for.", exit_code=130) from None
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
    if answer is not None and answer["message"]:
        echo(answer["message"], err=True)
    return view
