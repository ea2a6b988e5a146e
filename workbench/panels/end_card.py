"""The card of a run that ended: what it leaves and the keys for it; or why it failed, the lines that matter, and the way on."""

from __future__ import annotations

from engine.figures import count, duration
from engine.run.curves import format_metric, leading, titled
from engine.run.ending import MEMORY, End
from engine.run.proposals import shown
from engine.run.view import RunView
from workbench.panels.drawn import Scrolled
from workbench.panels.paint import Line, clean, cut, paragraph
from workbench.panels.run_table import spark

LABEL = 13
BAD = ("failed", "lost")
TRACE = 16  # signs of the memory's curve
LOG_LINES = 5  # with them the way on still stands within 24 rows
KEYS = {"chat": "C, enter", "evaluate": "E", "tasks": "M", "export": "X", "longer": "T", "prune": "P"}
COMPARE = ("B", "compare it", "with another run")
Row = tuple[str, list[Line]]


class EndCard(Scrolled):
    """A page of its own, on which a run that is over opens."""

    DEFAULT_CSS = "EndCard { height: auto; max-height: 100%; padding: 1 1 0 1; }"
    view: RunView | None = None
    end = End()

    def show(self, view: RunView, end: End) -> None:
        """Draw the card; its height follows its text."""
        self.view, self.end = view, end
        lines = self.lines(max(30, self.app.size.width - 3))
        self.styles.height = len(lines) + 1
        self.redraw()

    def lines(self, width: int) -> list[Line]:
        """What is known, then what can be done."""
        view = self.view
        if view is None:
            return []
        room = width - LABEL
        rows = self._failed(view, room) if view.state in BAD else self._finished(room)
        drawn: list[Line] = []
        for label, lines in rows:
            style = "here" if label == "enter" else "dim"
            drawn += [[(f"{label if place == 0 else '':{LABEL}}", style), *line] for place, line in enumerate(lines)]
        return [*drawn, *self._ways(width)]

    def _finished(self, room: int) -> list[Row]:
        styles = {"asked": "accent", "": "value"}
        return [(what, paragraph(clean(words), room, styles.get(what, "given"))) for what, words in self.end.facts]

    def _ways(self, width: int) -> list[Line]:
        """A key, what it does, and what that means."""
        ways = [(KEYS[way.do], way.title, way.means) for way in self.end.ways]
        if not ways:
            return []
        drawn: list[Line] = [[]]
        for key, title, means in (*ways, COMPARE):
            words = paragraph(clean(means), width - LABEL - 15, "dim")
            drawn.append([(f"{key:{LABEL}}", "accent"), (f"{title:15}", "given"), *words[0]])
            drawn += [[(" " * (LABEL + 15), ""), *line] for line in words[1:]]
        return drawn

    def _failed(self, view: RunView, room: int) -> list[Row]:
        cause = clean(view.cause or "It ended without a word; nothing in its log names a cause.")
        rows: list[Row] = [("cause", paragraph(cause, room, "bad"))]
        cause_lines = [line for line in view.cause_lines if line.strip()][-LOG_LINES:]
        if cause_lines:
            rows.append(("the log says", [[(cut(clean(line), room), "value")] for line in cause_lines]))
        rows.append(("kept", paragraph(self._kept(view), room, "value")))
        facts = [(what, self._traced(view, what, words, room)) for what, words in self.end.facts]
        if (change := self.end.change) is not None:
            lines: list[Line] = []
            for path, before, after in change.sets:
                lines += [
                    [(f"- {clean(f'{path}: {shown(before)}')}", "bad")],
                    [(f"+ {clean(f'{path}: {shown(after)}')}", "good")],
                ]
            rows.append(("proposed", [*lines, *paragraph(clean(change.why), room, "dim")]))
        way_on = self.end.way_on
        if self.end.blocked:
            rows.append(("first", paragraph(clean(way_on), room, "value")))
            way_on = "open its config in the form; what is started there is a new run"
        if way_on:
            rows.append(("enter", paragraph(clean(way_on), room, "here")))
        rows += facts
        rows.append(("last values", paragraph(_values(view), room, "value")))
        return rows

    def _traced(self, view: RunView, what: str, words: str, room: int) -> list[Line]:
        """A fact in words; that of the memory behind its curve over all steps."""
        trace = spark(view.series[MEMORY].points(width=TRACE)[2], TRACE) if what == "memory" else ""
        left = f"{trace}  " if trace else ""
        drawn = paragraph(clean(words), room - len(left), "value")
        return [[(left if place == 0 else " " * len(left), "accent"), *line] for place, line in enumerate(drawn)]

    def _kept(self, view: RunView) -> str:
        """By the folder once it was looked at, by the events until then."""
        known = view.committed
        step = self.end.step if self.end.way_on else known[-1] if known else None
        if step is None:
            return "no checkpoint: a new start begins at step 0"
        lost = view.step - step
        return f"checkpoint-{step}; {f'{count(lost)} steps after it are lost' if lost > 0 else 'nothing is lost'}"


def _values(view: RunView) -> str:
    parts = [f"step {count(view.step)}" + (f" of {count(view.max_steps)}" if view.max_steps else "")]
    names = [name for group in leading(view.method, view.latest) for name in group]
    parts += [f"{titled(name)} {format_metric(name, view.latest[name])}" for name in names if name in view.latest][:5]
    if view.seconds:
        parts.append(f"after {duration(view.seconds)}")
    return ", ".join(parts)
