"""The stop menu: four ways, each with what is kept, about how long it takes, and what can be done with it later."""

from __future__ import annotations

import math
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content

from engine.run.view import RunView
from workbench.panels.figures import brief, count, size
from workbench.panels.paint import wrap
from workbench.panels.watching import committed
from workbench.screens.dialog import Item, Pick

LATER = "It can be resumed."


class StopMenu(Pick):
    """Gives one of the words of `engine.run.control`, or nothing."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "take('save_stop')", show=False),
        Binding("c", "take('checkpoint')", show=False),
        Binding("e", "take('end_of_epoch')", show=False),
        Binding("n", "take('stop')", show=False),
    ]

    def __init__(self, view: RunView) -> None:
        super().__init__("How should it stop?", ways(view))

    def action_take(self, do: str) -> None:
        """The way with this letter."""
        self.dismiss(do)


def ways(view: RunView) -> list[Item]:
    """The four ways for the run as it stands."""
    cost = _cost(view)
    left = epoch_seconds(view)
    when = f"about {brief(left)} from now" if left is not None else "when the epoch is through"
    return [
        _way("save_stop", "s", "save, then stop", f"Keeps all {count(view.step)} steps{cost}. {LATER}"),
        _way("checkpoint", "c", "checkpoint and go on", f"Keeps all steps so far{cost}. The run continues."),
        _way("end_of_epoch", "e", "stop at the end of this epoch", f"Trains on, saves and stops {when}. {LATER}"),
        _way("stop", "n", "stop now", kept_now(view)),
    ]


def _way(do: str, letter: str, title: str, text: str) -> Item:
    return Item(
        do,
        Content.assemble((f"{letter}  ", "bold $accent"), (title, "bold")),
        Content("\n".join(f"   {line}" for line in wrap(text, 55))),
    )


def _cost(view: RunView) -> str:
    """How long the last checkpoint took and how large it was."""
    known = [entry for entry in view.checkpoints if entry.get("bytes") or entry.get("seconds")]
    if not known:
        return ""
    last = known[-1]
    parts = [f"about {brief(last['seconds'])}"] if last.get("seconds") else []
    parts += [size(last["bytes"])] if last.get("bytes") else []
    return f" ({', '.join(parts)})" if parts else ""


def kept_now(view: RunView) -> str:
    """What is left of a run that stops without saving."""
    steps = committed(view)
    if not steps:
        return f"Keeps nothing: there is no checkpoint yet. {count(view.step)} steps are lost."
    lost = view.step - steps[-1]
    if lost <= 0:
        return f"Keeps checkpoint-{steps[-1]}; nothing is lost. {LATER}"
    seconds = f" ({brief(lost * view.step_seconds)})" if view.step_seconds else ""
    return f"Keeps checkpoint-{steps[-1]}; the {count(lost)} steps since then{seconds} are lost. {LATER}"


def epoch_seconds(view: RunView) -> float | None:
    """Seconds to the end of this epoch at the present pace; None while that is not known."""
    if not view.epoch or not view.step or view.step_seconds is None:
        return None
    steps = (math.floor(view.epoch) + 1 - view.epoch) * view.step / view.epoch
    if view.max_steps:
        steps = min(steps, view.max_steps - view.step)
    return max(0.0, steps * view.step_seconds)
