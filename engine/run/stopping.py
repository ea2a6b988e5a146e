"""The ways to stop a run in words: what each keeps, about how long it takes, and what became of what was asked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.figures import brief, count, size
from engine.run.view import RunView

NAMES = {
    "stop": "stop now",
    "save_stop": "save, then stop",
    "checkpoint": "checkpoint",
    "end_of_epoch": "stop at the end of the epoch",
}
LATER = "It can be resumed."


@dataclass(frozen=True, slots=True)
class Way:
    """One thing to ask of a run: the word of `engine.run.control`, its title, what it keeps now, and what it does."""

    do: str
    title: str
    keeps: str
    means: str
    """Changes with a checkpoint and not with every step, for a view that is drawn anew when it changes."""


def ways(view: RunView) -> list[Way]:
    """The four ways for the run as it stands."""
    cost, left = _cost(view), epoch_seconds(view)
    when = f"about {brief(left)} from now" if left is not None else "when the epoch is through"
    newest = f"the last is of step {count(view.committed[-1])}" if view.committed else "there is none yet"
    return [
        Way("save_stop", "save, then stop", f"Keeps all {count(view.step)} steps{cost}. {LATER}",
            "save a checkpoint, then stop"),
        Way("checkpoint", "checkpoint and go on", f"Keeps all steps so far{cost}. The run continues.",
            "save a checkpoint and go on"),
        Way("end_of_epoch", "stop at the end of this epoch", f"Trains on, saves and stops {when}. {LATER}",
            "stop at the end of this epoch, with a checkpoint"),
        Way("stop", "stop now", _kept_now(view), f"stop after this step; checkpoints made so far are kept; {newest}"),
    ]  # fmt: skip


def answered(answer: Mapping[str, Any]) -> str:
    """What a run said to a request: `save, then stop: accepted. saving step 60`."""
    return f"{NAMES.get(answer['do'], answer['do'])}: {answer['status']}. {answer['message']}".rstrip()


def _cost(view: RunView) -> str:
    """How long the last checkpoint took and how large it was."""
    known = [entry for entry in view.checkpoints if entry.get("bytes") or entry.get("seconds")]
    if not known:
        return ""
    last = known[-1]
    parts = [f"about {brief(last['seconds'])}"] if last.get("seconds") else []
    parts += [size(last["bytes"])] if last.get("bytes") else []
    return f" ({', '.join(parts)})" if parts else ""


def _kept_now(view: RunView) -> str:
    """What is left of a run that stops without saving."""
    if not view.committed:
        return f"Keeps nothing: there is no checkpoint yet. {count(view.step)} steps are lost."
    last = view.committed[-1]
    lost = view.step - last
    if lost <= 0:
        return f"Keeps checkpoint-{last}; nothing is lost. {LATER}"
    seconds = f" ({brief(lost * view.step_seconds)})" if view.step_seconds else ""
    return f"Keeps checkpoint-{last}; the {count(lost)} steps since then{seconds} are lost. {LATER}"


def epoch_seconds(view: RunView) -> float | None:
    """Seconds to the end of this epoch at the present pace; None while that is not known."""
    if not view.epoch or not view.step or view.step_seconds is None:
        return None
    steps = (math.floor(view.epoch) + 1 - view.epoch) * view.step / view.epoch
    if view.max_steps:
        steps = min(steps, view.max_steps - view.step)
    return max(0.0, steps * view.step_seconds)
