"""When a run counts as silent: no event for longer than anything it does between two events takes.

The bound follows what the run itself has shown: three times the longest wait between two events so far, of its own for the
steps at which it measures, saves or samples, since those may take far longer than a step. What has not been seen yet (the
model's loading, the first step, the first evaluation) gets minutes.
"""

from __future__ import annotations

from engine import figures
from engine.run.view import RunView

LEAST, UNSEEN, TIMES = 30.0, 600.0, 3.0


def bound(view: RunView) -> float:
    """Seconds without an event after which the run is silent."""
    if view.state == "starting" or not view.step:
        return UNSEEN
    if view.pausing:
        return max(LEAST, TIMES * max(view.longest_pause, view.longest_gap)) if view.longest_pause else UNSEEN
    return max(LEAST, TIMES * view.longest_gap)


def silent_for(view: RunView, quiet: float) -> int | None:
    """Whole seconds of silence of a run whose last event is `quiet` seconds old; None where all is as it should be."""
    if view.state not in ("starting", "running", "stopping") or quiet <= bound(view):
        return None
    return int(quiet)


def describe(seconds: int | None) -> str:
    """`silent for 45 s`, or nothing for a run that is not silent."""
    if seconds is None:
        return ""
    return f"silent for {seconds} s" if seconds < 120 else f"silent for {figures.duration(seconds)}"


def advice(run: str, seconds: int | None) -> str:
    """What that means and what a person can do, in two sentences; nothing for a run that is not silent."""
    if seconds is None:
        return ""
    return (
        f"{run} is {describe(seconds)}, longer than anything it does takes: its worker may hang. "
        f"`workbench stack {run}` shows where it is."
    )
