"""A line chart in braille dots: axes, several lines, log scale, smoothing, zoom, pan and a cursor that names values.

It draws only when its data, its window or its size changed, and its cost does not depend on the length of the run: a
series answers `points(start, stop, width)` with the lowest and highest value per column. It refuses to interpret the
numbers: what belongs together on one chart is decided by the screen.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.actions import SkipAction
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from engine.errors import visible
from workbench.panels import raster
from workbench.panels.curve import SMOOTHINGS, Fetched, Line, bounds_of, by_column, fetch, newest_by_column, to_dot
from workbench.panels.figures import count, number
from workbench.panels.glyphs import ascii_only
from workbench.panels.paint import cut

LEAST_LABEL = 6  # cells; a legend with less room than that says nothing

Place = Callable[[float], int | None]  # a value to its dot row
Window = tuple[int, int]  # first and last step


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
        self._window: tuple[int, int] | None = None  # first and last step shown; None follows the whole run
        self._strips: list[Strip] | None = None
        self._fetched: list[Fetched] = []
        self._fetched_for: object = None
        self._to_dot = to_dot(0, 1, 2)

    # Data in

    def show(self, lines: Sequence[Line], marks: Sequence[tuple[int, str]] = (), title: str | None = None) -> None:
        """Shows these lines; does nothing when neither they nor their stamps changed. `marks` are (step, sign of one cell), drawn on the axis."""
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

    def _move_window(self, start: int, width: int, whole: tuple[int, int]) -> None:
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
    def window(self) -> tuple[int, int] | None:
        """First and last step shown."""
        return self._window or self._extent()

    def values_at_cursor(self) -> tuple[int, int, list[tuple[str, float, float]]] | None:
        """First and last step of the drawn point under the cursor, and each line's lowest and highest value there.

        A drawn point may stand for many steps; it is named by its last one.
        """
        if self.cursor is None:
            return None
        first, last, found = self.cursor, self.cursor, []
        for index, column in enumerate(self._fetch()):
            place = min(bisect_left(column.steps, self.cursor), len(column.steps) - 1)
            if place < 0:
                continue
            if index == 0:
                behind = column.steps[place - 1] + 1 if place else None
                inside = self._lines[0].series.points(behind, column.steps[place])[0]
                if len(inside) > 1 and not self.smoothing:
                    first, last = inside[0], column.steps[place]
            found.append((column.name, column.low[place], column.high[place]))
        return first, last, found

    def _cursor_steps(self) -> Sequence[int]:
        fetched = self._fetch()
        return fetched[0].steps if fetched else ()

    def _extent(self) -> tuple[int, int] | None:
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
        self._fetched = [fetch(line, start, stop, fine, self.smoothing) for line in self._lines]
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
        base = self.rich_style
        if width < 1 or height < 1:
            return []
        fetched = [column for column in self._fetch() if len(column.steps)]
        bounds = bounds_of(fetched, self.log_scale)
        title = self._title_strip(width, base)
        if bounds is None or height < 3 or width < 12:
            blank = [Strip.blank(width, base) for _ in range(height - 1)]
            if blank:
                words = "no values yet" if not fetched else "no values above zero for a log scale"
                style = base + self._style("faint")
                blank[len(blank) // 2] = _fit([Segment(words.center(width), style)], width, base)
            return [title, *blank]
        axis_rows = 1 if height >= 5 else 0
        rows = height - 1 - axis_rows
        low, high = bounds
        place = raster.scale(low, high, rows if ascii_only() else 4 * rows, self.log_scale)
        values = raster.ticks(low, high, max(2, rows // 2), self.log_scale)
        labels = dict(zip(values, _labels(values, self.log_scale), strict=True))
        gutter = max((len(label) for label in labels.values()), default=1)
        grid, window = self._plot(fetched, width - gutter - 1, rows, place)
        strips = [title, *self._body(grid, labels, gutter, place, window, base)]
        if axis_rows:
            strips.append(self._axis(window, gutter + 1, width, base))
        return strips

    def _plot(self, fetched: list[Fetched], columns: int, rows: int, place: Place) -> tuple[raster.Grid, Window]:
        grid = raster.Grid(max(1, columns), rows, plain=ascii_only())
        first, last = self.window or (fetched[0].steps[0], fetched[0].steps[-1])
        self._to_dot = to_dot(first, last, grid.across)
        # The first line is drawn last, so that it lies on top.
        for index in reversed(range(len(fetched))):
            column = fetched[index]
            if column.smooth is not None:
                xs, low, high = by_column(column.steps, column.low, column.high, self._to_dot)
                raster.draw(grid, xs, low, high, place, index + raster.FAINT, 0)
        for index in reversed(range(len(fetched))):
            column = fetched[index]
            if column.smooth is None:
                drawn = by_column(column.steps, column.low, column.high, self._to_dot)
            else:
                xs, ends = newest_by_column(column.steps, column.smooth, self._to_dot)
                drawn = xs, ends, ends
            raster.draw(grid, *drawn, place, index, index)
        return grid, (first, last)

    def _body(
        self, grid: raster.Grid, labels: dict[float, str], gutter: int, place: Place, window: Window, base: Style
    ) -> list[Strip]:
        axis, plain = base + self._style("axis"), grid.plain
        at_row: dict[int, str] = {}
        for value, label in labels.items():
            dot = place(value)
            if dot is not None:
                at_row.setdefault(min(grid.rows - 1, max(0, dot if plain else dot // 4)), label)
        cursor_cell = -1
        if self.cursor is not None and window[0] <= self.cursor <= window[1]:
            cursor_cell = self._to_dot(self.cursor) // (1 if plain else 2)
        strips = []
        for row in range(grid.rows):
            label = at_row.get(row) or ""
            edge = ("+" if plain else "┤") if label else ("|" if plain else "│")
            segments = [Segment(label.rjust(gutter) + edge, axis)]
            segments += self._row(grid, row, cursor_cell, base)
            strips.append(_fit(segments, gutter + 1 + grid.columns, base))
        return strips

    def _row(self, grid: raster.Grid, row: int, cursor_cell: int, base: Style) -> list[Segment]:
        """One row of cells as runs of one style."""
        start = row * grid.columns
        bits, owners = grid.bits[start : start + grid.columns], grid.owner[start : start + grid.columns]
        segments: list[Segment] = []
        text: list[str] = []
        run: int | None = None

        def flush() -> None:
            if text:
                segments.append(Segment("".join(text), base + self._line_style(run) if run is not None else base))
                text.clear()

        for cell in range(grid.columns):
            owner = -2 if cell == cursor_cell else (owners[cell] if bits[cell] else -1)
            if owner != run:
                flush()
                run = owner
            if grid.plain:
                text.append(
                    "*o+x"[owner % raster.FAINT % 4] if bits[cell] and owner >= 0 else ("|" if owner == -2 else " ")
                )
            elif bits[cell]:
                text.append(chr(0x2800 + bits[cell]))
            else:
                text.append("│" if owner == -2 else " ")
        flush()
        return segments

    def _axis(self, window: tuple[int, int], left: int, width: int, base: Style) -> Strip:
        style = base + self._style("axis")
        room = width - left
        first, last = count(window[0]), count(window[1])
        cells = list(" " * room)
        cells[: len(first)] = first
        if room > len(first) + len(last) + 2:
            cells[room - len(last) :] = last
        per = 1 if ascii_only() else 2
        for step, sign in self._marks:
            if window[0] <= step <= window[1]:
                cell = min(room - 1, self._to_dot(step) // per)
                if cells[cell] == " ":
                    cells[cell] = sign[:1]
        if self.cursor is not None and window[0] <= self.cursor <= window[1]:
            label = count(self.cursor)
            start = min(max(0, self._to_dot(self.cursor) // per - len(label) // 2), max(0, room - len(label)))
            before, after = "".join(cells[:start]), "".join(cells[start + len(label) :])
            segments = [Segment(" " * left + before, style), Segment(label, base + self._style("cursor"))]
            return _fit([*segments, Segment(after, style)], width, base)
        return _fit([Segment(" " * left + "".join(cells[:room]), style)], width, base)

    def _title_strip(self, width: int, base: Style) -> Strip:
        faint, bold = base + self._style("axis"), base + self._style("title")
        segments = []
        at = self.values_at_cursor()
        if at is not None:
            first, last, values = at
            segments.append(
                Segment(f"step {count(first)}" if first == last else f"steps {count(first)}-{count(last)}", bold)
            )
            for index, (name, low, high) in enumerate(values):
                words = (
                    number(low) if low == high or number(low) == number(high) else f"{number(low)} to {number(high)}"
                )
                segments.append(Segment(f"  {visible(name)} ", base + self._line_style(index)))
                segments.append(Segment(words, bold))
        elif len(self._lines) > 1:
            signs = raster.STYLE_SIGNS_PLAIN if ascii_only() else raster.STYLE_SIGNS
            if self.title:
                segments.append(Segment(f"{visible(self.title)}  ", bold))
            left = width - sum(cell_len(segment.text) for segment in segments)
            for index, line in enumerate(self._lines):
                sign, label = f"{signs[index % len(signs)]} ", visible(line.label or line.name)
                room = left - cell_len(sign)
                if index and room < LEAST_LABEL:
                    break
                label = cut(label, room)
                segments.append(Segment(sign, base + self._line_style(index)))
                segments.append(Segment(f"{label}  ", bold if index == 0 else faint))
                left = room - cell_len(label) - 2
        else:
            segments.append(Segment(visible(self.title), bold))
        flags = [
            word
            for word, on in (("log", self.log_scale), (self.smoothing, bool(self.smoothing)), ("zoom", self._window))
            if on
        ]
        if flags:
            segments.append(Segment("  " + " ".join(flags), faint))
        return _fit(segments, width, base)

    def _style(self, part: str) -> Style:
        return self.get_component_rich_style(f"chart--{part}")

    def _line_style(self, line: int) -> Style:
        if line == -2:
            return self._style("axis")
        if line < 0:
            return Style.null()
        return self._style("faint") if line >= raster.FAINT else self._style(f"line-{line % 4}")


def _labels(values: Sequence[float], log: bool) -> list[str]:
    return [raster.tick_labels([value])[0] for value in values] if log else raster.tick_labels(values)


def _fit(segments: list[Segment], width: int, base: Style) -> Strip:
    return Strip(segments).adjust_cell_length(width, base).simplify()
