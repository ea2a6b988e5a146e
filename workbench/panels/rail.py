"""The rail: the seven steps with their state, and how many findings there are. Moving through it loses nothing.

A state is a glyph and a style, and in words on the last lines; colour never says it alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from textual import events
from textual.binding import Binding
from textual.message import Message

from workbench.panels.drawn import Drawn
from workbench.panels.paint import Line, wrap

GLYPHS = {"done": "✓", "open": " ", "error": "✗", "warning": "!", "hint": "?"}
LOOKS = {"done": "good", "open": "dim", "error": "bad", "warning": "warn", "hint": "hint"}


@dataclass(frozen=True)
class Stop:
    """One step on the rail: `state` is done, open, error, warning or hint."""

    id: str
    title: str
    state: str


class Rail(Drawn, can_focus=True):
    """The list of steps; Up and Down change the step, Enter or Right goes into its form."""

    BINDINGS = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("enter,right,l", "enter", show=False),
    ]

    class Chosen(Message):
        """Another step was chosen."""

        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index

    class Entered(Message):
        """The person wants to go into the step."""

    def __init__(self) -> None:
        super().__init__()
        self.stops: tuple[Stop, ...] = ()
        self.here = 0
        self.totals: dict[str, int] = {}
        self.waiting = ""

    def show(self, stops: tuple[Stop, ...], here: int, totals: dict[str, int], waiting: str = "") -> None:
        """Draw this state if it differs from the one shown."""
        state = (stops, here, totals, waiting)
        if state != (self.stops, self.here, self.totals, self.waiting):
            self.stops, self.here, self.totals, self.waiting = state
            self.redraw()

    def lines(self, width: int) -> list[Line]:
        """A line a step, then the totals."""
        drawn: list[Line] = []
        for index, stop in enumerate(self.stops):
            glyph = GLYPHS[stop.state]
            if index == self.here:
                drawn.append([("›", "accent"), (f"{glyph} ", LOOKS[stop.state]), (stop.title, "here")])
            else:
                drawn.append([(f" {glyph} ", LOOKS[stop.state]), (stop.title, "dim" if stop.state == "open" else "")])
        drawn.append([])
        for severity, one, many in (
            ("error", "error", "errors"),
            ("warning", "warning", "warnings"),
            ("hint", "hint", "hints"),
        ):
            count = self.totals.get(severity, 0)
            if count:
                words = f"{GLYPHS[severity]} {count} {one if count == 1 else many}"
                drawn.append([(f" {words}" if len(words) < width else words, LOOKS[severity])])
        if not any(self.totals.values()) and self.stops:
            drawn.append([(" no findings", "dim")] if self.waiting else [(" ✓ all well", "good")])
        if self.waiting:
            drawn.extend([[(f" {words}", "dim")] for words in wrap(self.waiting, width - 1)])
        return drawn

    def ground(self, y: int) -> str:
        """The step on screen has a background; a stronger one while the rail has the keys."""
        if y != self.here or not self.stops:
            return ""
        return "cursor" if self.has_focus else "place"

    def on_focus(self) -> None:
        """Show where the keys go."""
        self.redraw()

    def on_blur(self) -> None:
        """Show where the keys go."""
        self.redraw()

    def action_move(self, by: int) -> None:
        """Previous or next step."""
        there = min(max(self.here + by, 0), len(self.stops) - 1)
        if there != self.here:
            self.post_message(self.Chosen(there))

    def action_enter(self) -> None:
        """Into the form."""
        self.post_message(self.Entered())

    def on_click(self, event: events.Click) -> None:
        """A click on a step goes there."""
        if event.y < len(self.stops):
            self.post_message(self.Chosen(event.y))
