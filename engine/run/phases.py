"""What a run does before its first step: what is done and how long it took, what goes on, and what is still to come."""

from __future__ import annotations

import time
from dataclasses import dataclass

from engine.figures import brief
from engine.run.view import RunView

ORDER = {
    "Reading the config": "config",
    "Loading the libraries": "libraries",
    "Loading the tokenizer": "tokenizer",
    "Preparing the data": "rows",
    "Loading the model": "model",
    "Building the trainer": "trainer",
    "Training": "first step",
}
"""The phases of a worker in their order, each in a word; others (timing kernels, compiling layers) come between."""


LAST = "Training"
TITLE = "before the first step"
"""What a list of them is called."""


@dataclass(frozen=True, slots=True)
class Phase:
    """`state` is done, now or later; `seconds` is how long it took, or has gone on; None for what is still to come."""

    word: str
    state: str
    seconds: float | None = None

    @property
    def time(self) -> str:
        """Its seconds as a person reads them."""
        return "" if self.seconds is None else brief(self.seconds)


def reason(view: RunView) -> str:
    """Why the phase that goes on is worth its time, where it says that."""
    return view.phase.partition(": ")[2]


def before_first_step(view: RunView, now: float | None = None) -> list[Phase]:
    """The way to the first step of this start; empty for a run that has taken one, is over, or waits for its turn."""
    if view.over or view.state == "queued":
        return []
    # Until a resumed run has begun, its steps are those of the starts before.
    if view.state != "starting" and view.step > (view.resumed_from or 0):
        return []
    if not view.phases:
        return [Phase("process", "now"), *(Phase(word, "later") for word in ORDER.values())]
    now = time.time() if now is None else now
    begun = [(str(phase["name"]), float(phase["t"])) for phase in view.phases]
    ends = [*(t for _, t in begun[1:]), max(now, begun[-1][1])]
    states = ["done"] * (len(begun) - 1) + ["now"]
    phases = [
        Phase(ORDER.get(name, name.partition(":")[0].lower()), state, max(0.0, end - t))
        for (name, t), end, state in zip(begun, ends, states, strict=True)
        if name != LAST or state == "now"  # a step that was begun and waits, as for the compiler, is still to come
    ]
    begun = [each for each in begun[:-1] if each[0] != LAST] + begun[-1:]
    known = {name for name, _ in begun}
    last = max((place for place, name in enumerate(ORDER) if name in known), default=-1)
    return [*phases, *(Phase(word, "later") for place, word in enumerate(ORDER.values()) if place > last)]
