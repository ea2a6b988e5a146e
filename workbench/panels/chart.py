"""A line chart in braille dots: axes, several lines, log scale, smoothing, zoom, pan and a cursor that names values.

It draws only when its data, its window or its size changed, and its cost does not depend on the length of the run: a
series answers `points(start, stop, width)` with the lowest and highest value per column. It refuses to interpret the
numbers: what belongs together on one chart is decided by the screen, and how it looks by `picture`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import ClassVar

from rich.style import Style
from textual.actions import SkipAction
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from workbench.panels.curve import SMOOTHINGS, Fetched, Line, Value, fetch
from workbench.panels.picture import Cursor, Picture, Window


class Chart(Widget, can_focus=True):
    """One chart. Arrows move the cursor, `+` and `-` zoom, Shift with arrows pans, `0` shows the whole run."""

    DEFAULT_CSS = """
    Chart { height: 1fr; width: 1fr; }
    Chart .chart--title { color: $foreground; text-style: bold; }
    Chart .chart--axis { color: $foreground 60%; }
    Chart:focus .chart--title { color: $text-accent; text-style: bold; }
    Chart .chart--faint { color: $foreground 30%; }
    Chart .chart--cursor { color: $text-accent; text-style: reverse; }
    Chart .chart--line-0 { color: $primary; }
    Chart .chart--line-1 { color: $warning; }
    Chart .chart--line-2 { color: $success; }
    Chart .chart--line-3 { color: $error; }
    """
    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "chart--title",
        "chart--axis",
        "chart--faint",
        "chart--cursor",
        *(f"chart--line-{index}" for index in range(4)),
    }
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left,h", "cursor(-1)", "cursor", show=False),
        Binding("right,l", "cursor(1)", "cursor", show=False),
        Binding("home,g", "cursor_end(-1)", "first", show=False),
        Binding("end,G", "cursor_end(1)", "newest", show=False),
        Binding("shift+left,H", "pan(-1)", "pan", show=False),
        Binding("shift+right", "pan(1)", "pan", show=False),
        Binding("plus,equals_sign,up", "zoom(0.5)", "zoom in", show=False),
        Binding("minus,down", "zoom(2)", "zoom out", show=False),
        Binding("0", "whole", "whole run", show=False),
        Binding("L", "log", "log scale", show=False),
        Binding("m", "smooth", "smooth", show=False),
        Binding("enter", "pick", "batch at the cursor", show=False),
    ]

    class Picked(Message):
        """The person chose the point under the cursor."""

        def __init__(self, chart: Chart, step: int) -> None:
            super().__init__()
            self.chart, self.step = chart, step

    def __init__(self, title: str = "", *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self.title = title
        self.log_scale = False
        self.smoothing = ""
        self.cursor: int | None = None
        self.draws = 0  # how often the picture was made anew; a quiet run makes none
        self._lines: tuple[Line, ...] = ()
        self._marks: tuple[tuple[int, str], ...] = ()
        self._window: Window | None = None  # first and last step shown; None follows the whole run
        self._strips: list[Strip] | None = None
        self._fetched: list[Fetched] = []
        self._fetched_for: object = None

    # Data in

    def show(self, lines: Sequence[Line], marks: Sequence[tuple[int, str]] = (), title: str | None = None) -> None:
        """Shows these lines; does nothing when neither they nor their stamps changed.

        `marks` are (step, sign of one cell), drawn on the axis.
        """
        new, marks = tuple(lines), tuple(marks)
        title = self.title if title is None else title
        if new == self._lines and marks == self._marks and title == self.title:
            return
        if [line.name for line in new] != [line.name for line in self._lines]:
            self._window = self.cursor = None
        self._lines, self._marks, self.title = new, marks, title
        self._changed()

    def _changed(self) -> None:
        self._strips = None
        self.refresh()

    # Keys

    def action_cursor(self, by: int) -> None:
        """Moves the cursor to the neighbouring drawn point."""
        steps = self._cursor_steps()
        if not steps:
            return
        if self.cursor is None:
            self.cursor = steps[-1]
        else:
            here = bisect_left(steps, self.cursor)
            if by < 0 or (here < len(steps) and steps[here] == self.cursor):
                here += by
            self.cursor = steps[min(len(steps) - 1, max(0, here))]
        self._changed()

    def action_cursor_end(self, side: int) -> None:
        steps = self._cursor_steps()
        if steps:
            self.cursor = steps[0 if side < 0 else -1]
            self._changed()

    def clear_cursor(self) -> bool:
        """Takes the cursor away; False when there was none."""
        if self.cursor is None:
            return False
        self.cursor = None
        self._changed()
        return True

    def action_zoom(self, factor: float) -> None:
        """Halves or doubles the window around the cursor, or around its newest step."""
        whole, shown = self._extent(), self.window
        if whole is None or shown is None:
            return
        centre = shown[1] if self.cursor is None else self.cursor
        width = max(8, round((shown[1] - shown[0]) * factor))
        share = (centre - shown[0]) / ((shown[1] - shown[0]) or 1)
        self._move_window(round(centre - width * share), width, whole)

    def action_pan(self, by: int) -> None:
        whole, shown = self._extent(), self._window
        if whole is None or shown is None:
            return
        width = shown[1] - shown[0]
        self._move_window(shown[0] + by * max(1, width // 4), width, whole)

    def _move_window(self, start: int, width: int, whole: Window) -> None:
        if width >= whole[1] - whole[0]:
            self._window = None
        else:
            start = min(max(start, whole[0]), whole[1] - width)
            self._window = (start, start + width)
        self._changed()

    def action_whole(self) -> None:
        self._window = self.cursor = None
        self._changed()

    def action_log(self) -> None:
        self.log_scale = not self.log_scale
        self._changed()

    def action_smooth(self) -> None:
        self.smoothing = SMOOTHINGS[(SMOOTHINGS.index(self.smoothing) + 1) % len(SMOOTHINGS)]
        self._changed()

    def action_pick(self) -> None:
        if self.cursor is None:
            raise SkipAction  # the key may mean something to the screen
        self.post_message(self.Picked(self, self.cursor))

    # What is shown

    @property
    def window(self) -> Window | None:
        """First and last step shown."""
        return self._window or self._extent()

    def values_at_cursor(self) -> Cursor | None:
        """First and last step of the drawn point under the cursor, and each line's lowest and highest value there.

        A drawn point may stand for many steps; it is named by its last one.
        """
        if self.cursor is None:
            return None
        first, last, found = self.cursor, self.cursor, []
        for index, column in enumerate(self._fetch()):
            place = min(bisect_left(column.steps, self.cursor), len(column.steps) - 1)
            if place < 0 or (self._apart and self.cursor > column.steps[-1]):  # a run that had ended by then
                continue
            if index == 0 and not self._apart:
                behind = column.steps[place - 1] + 1 if place else None
                inside = self._lines[0].series.points(behind, column.steps[place])[0]
                if len(inside) > 1 and not self.smoothing:
                    first, last = inside[0], column.steps[place]
            found.append(Value(column.name, column.low[place], column.high[place], column.tone, column.unit))
        return first, last, found

    def _cursor_steps(self) -> Sequence[int]:
        fetched = self._fetch()
        if self._apart:
            return sorted({step for column in fetched for step in column.steps})
        return fetched[0].steps if fetched else ()

    @property
    def _apart(self) -> bool:
        """Whether these are lines of several runs, which have each their own steps."""
        return any(line.tone is not None for line in self._lines)

    def _extent(self) -> Window | None:
        """First and last step of all lines. A coarse point is named by its last step, so the first is looked at finely."""
        ends = []
        for line in self._lines:
            steps = line.series.points(width=64)[0]
            if len(steps):
                ends.append((line.series.points(None, steps[0])[0][0], steps[-1]))
        return (min(a for a, _ in ends), max(b for _, b in ends)) if ends else None

    def _fetch(self) -> list[Fetched]:
        """The lines of the present window, decimated for the present width; fetched once per change."""
        fine = max(16, 2 * self.size.width) * (4 if self.smoothing else 1)
        key = (self._lines, self._window, fine, self.smoothing)
        if key == self._fetched_for:
            return self._fetched
        start, stop = self._window or (None, None)
        self._fetched = [
            fetch(line, start, stop, fine, self.smoothing, place) for place, line in enumerate(self._lines)
        ]
        self._fetched_for = key
        return self._fetched

    # Drawing

    def render_line(self, y: int) -> Strip:
        if (
            self._strips is None
            or len(self._strips) != self.size.height
            or self._strips[0].cell_length != self.size.width
        ):
            self._strips = self._picture()
            self.draws += 1
        return self._strips[y] if y < len(self._strips) else Strip.blank(self.size.width, self.rich_style)

    def notify_style_update(self) -> None:
        """The theme changed: the picture keeps its shape and takes the new colours."""
        super().notify_style_update()
        self._strips = None

    def _picture(self) -> list[Strip]:
        width, height = self.size
        if width < 1 or height < 1:
            return []
        return Picture(
            lines=self._lines,
            fetched=[column for column in self._fetch() if len(column.steps)],
            window=self.window,
            zoomed=self._window is not None,
            title=self.title,
            marks=self._marks,
            cursor=self.cursor,
            at=self.values_at_cursor(),
            log_scale=self.log_scale,
            smoothing=self.smoothing,
            style=self._style,
            base=self.rich_style,
        ).strips(width, height)

    def _style(self, part: str) -> Style:
        return self.get_component_rich_style(f"chart--{part}")
