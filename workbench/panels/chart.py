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

from workbench.panels.curve import SMOOTHINGS, Curves, Line, Window, axis_of
from workbench.panels.picture import Cursor, Picture


class Chart(Widget, can_focus=True):
    """One chart. Arrows move the cursor, `+` and `-` zoom, Shift with arrows pans, `0` shows the whole run.

    The axis follows most of the values until `L` chooses: linear or logarithmic, with every value."""

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
        self.log_scale: bool | None = None
        """None: the values decide."""
        self.curves = Curves()
        self.cursor: int | None = None
        self.draws = 0  # how often the picture was made anew; a quiet run makes none
        self._marks: tuple[tuple[int, str], ...] = ()
        self._strips: list[Strip] | None = None

    # Data in

    def show(self, lines: Sequence[Line], marks: Sequence[tuple[int, str]] = (), title: str | None = None) -> None:
        """Shows these lines; does nothing when neither they nor their stamps changed.

        `marks` are (step, sign of one cell), drawn on the axis.
        """
        new, marks = tuple(lines), tuple(marks)
        title = self.title if title is None else title
        if new == self.curves.lines and marks == self._marks and title == self.title:
            return
        if [line.name for line in new] != [line.name for line in self.curves.lines]:
            self.curves.zoomed = self.cursor = None
        self.curves.lines, self._marks, self.title = new, marks, title
        self._changed()

    def _changed(self) -> None:
        self._strips = None
        self.refresh()

    # Keys

    def action_cursor(self, by: int) -> None:
        """Moves the cursor to the neighbouring drawn point."""
        steps = self.curves.steps(self.size.width)
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
        steps = self.curves.steps(self.size.width)
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
        shown = self.window
        if shown is None:
            return
        centre = shown[1] if self.cursor is None else self.cursor
        width = max(8, round((shown[1] - shown[0]) * factor))
        share = (centre - shown[0]) / ((shown[1] - shown[0]) or 1)
        self.curves.move(round(centre - width * share), width)
        self._changed()

    def action_pan(self, by: int) -> None:
        shown = self.curves.zoomed
        if shown is None:
            return
        width = shown[1] - shown[0]
        self.curves.move(shown[0] + by * max(1, width // 4), width)
        self._changed()

    def action_whole(self) -> None:
        self.curves.zoomed = self.cursor = self.log_scale = None
        self._changed()

    def action_log(self) -> None:
        axis = axis_of(self.curves.fetched(self.size.width), self.log_scale)
        self.log_scale = not (self.log_scale if axis is None else axis.log)
        self._changed()

    def action_smooth(self) -> None:
        now = SMOOTHINGS.index(self.curves.smoothing)
        self.curves.smoothing = SMOOTHINGS[(now + 1) % len(SMOOTHINGS)]
        self._changed()

    def action_pick(self) -> None:
        if self.cursor is None:
            raise SkipAction  # the key may mean something to the screen
        self.post_message(self.Picked(self, self.cursor))

    # What is shown

    @property
    def window(self) -> Window | None:
        """First and last step shown."""
        return self.curves.zoomed or self.curves.extent

    def values_at_cursor(self) -> Cursor | None:
        """First and last step of the drawn point under the cursor, and each line's lowest and highest value there."""
        return None if self.cursor is None else self.curves.at(self.cursor, self.size.width)

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
            lines=self.curves.lines,
            fetched=[column for column in self.curves.fetched(width) if len(column.steps)],
            window=self.window,
            zoomed=self.curves.zoomed is not None,
            title=self.title,
            marks=self._marks,
            cursor=self.cursor,
            at=self.values_at_cursor(),
            log_scale=self.log_scale,
            smoothing=self.curves.smoothing,
            style=self._style,
            base=self.rich_style,
        ).strips(width, height)

    def _style(self, part: str) -> Style:
        return self.get_component_rich_style(f"chart--{part}")
