"""The post-mortem card: why a run ended, the lines that matter, what is kept, the way on, and its last values."""

from __future__ import annotations

from engine.figures import count, duration
from engine.run.curves import leading
from engine.run.view import RunView
from workbench.panels.drawn import Scrolled
from workbench.panels.paint import Line, clean, cut, paragraph
from workbench.panels.units import titled, worded

LABEL = 13
ENDS = ("failed", "lost")
LOG_LINES = 5  # with them the way on still stands within 24 rows


class PostMortem(Scrolled):
    """Shown as a page of its own for a run that failed or was lost. `way_on` is what Enter would do, once known."""

    DEFAULT_CSS = "PostMortem { height: auto; max-height: 65%; padding: 1 1 0 1; }"
    view: RunView | None = None
    way_on = ""
    kept_step: int | None = None

    def show(self, view: RunView, way_on: str) -> None:
        """Draw the card; its height follows its text."""
        self.view, self.way_on = view, way_on
        made = self.lines(max(30, self.app.size.width - 3))
        self.styles.height = len(made) + 1
        self.redraw()

    def lines(self, width: int) -> list[Line]:
        """Cause, lines, checkpoints, way on, values."""
        view = self.view
        if view is None:
            return []
        rows: list[tuple[str, list[Line]]] = []
        room = width - LABEL
        cause = clean(view.cause or "It ended without a word; nothing in its log names a cause.")
        rows.append(("cause", paragraph(cause, room, "bad")))
        told = [line for line in view.cause_lines if line.strip()][-LOG_LINES:]
        if told:
            rows.append(("the log says", [[(cut(clean(line), room), "value")] for line in told]))
        rows.append(("kept", paragraph(self._kept(view), room, "value")))
        if self.way_on:
            rows.append(("enter", paragraph(clean(self.way_on), room, "here")))
        rows.append(("last values", paragraph(self._values(view), room, "value")))
        made: list[Line] = []
        for label, lines in rows:
            style = "here" if label == "enter" else "dim"
            made += [[(f"{label if place == 0 else '':{LABEL}}", style), *line] for place, line in enumerate(lines)]
        return made

    @staticmethod
    def _values(view: RunView) -> str:
        parts = [f"step {count(view.step)}" + (f" of {count(view.max_steps)}" if view.max_steps else "")]
        names = [name for group in leading(view.method, view.latest) for name in group]
        parts += [f"{titled(name)} {worded(name, view.latest[name])}" for name in names if name in view.latest][:5]
        if view.seconds:
            parts.append(f"after {duration(view.seconds)}")
        return ", ".join(parts)

    def _kept(self, view: RunView) -> str:
        """By the folder once it was looked at, by the events until then."""
        known = view.committed
        step = self.kept_step if self.way_on else known[-1] if known else None
        if step is None:
            return "no checkpoint: a new start begins at step 0"
        lost = view.step - step
        return f"checkpoint-{step}; {f'{count(lost)} steps after it are lost' if lost > 0 else 'nothing is lost'}"
