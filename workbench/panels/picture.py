"""The picture of a chart: title or legend, lines on a grid, labels of both axes, marks and the cursor, as strips.

Owns how a chart looks and nothing of its state: made from what is shown, used once. It refuses to fetch anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from engine.errors import visible
from engine.figures import count, number
from workbench.panels import raster
from workbench.panels.curve import Axis, Fetched, Line, Value, Window, axis_of, by_column, newest_by_column, to_dot
from workbench.panels.glyphs import ascii_only
from workbench.panels.paint import cut

LEAST_LABEL = 6  # cells; a legend with less room than that says nothing

Place = Callable[[float], int | None]  # a value to its dot row
Cursor = tuple[int, int, list[Value]]  # first and last step, each line there


@dataclass(frozen=True)
class Picture:
    """What is shown; `strips` draws it."""

    lines: Sequence[Line]
    fetched: list[Fetched]
    """The lines' points; those without any are left out."""
    window: Window | None
    zoomed: bool
    title: str
    marks: Sequence[tuple[int, str]]
    """Steps and signs of one cell, drawn on the axis."""
    cursor: int | None
    at: Cursor | None
    log_scale: bool | None
    """None: the values decide."""
    smoothing: str
    style: Callable[[str], Style]
    """A part's name (title, axis, faint, cursor, line-0 to line-3) to its style."""
    base: Style

    def strips(self, width: int, height: int) -> list[Strip]:
        """`height` strips of `width` cells; words instead of a plot where there is no value or no room."""
        base, fetched = self.base, self.fetched
        axis = axis_of(fetched, self.log_scale)
        title = self._title_strip(width, axis)
        if axis is None or height < 3 or width < 12:
            blank = [Strip.blank(width, base) for _ in range(height - 1)]
            if blank:
                words = "no values yet" if not fetched else "no values above zero for a log scale"
                style = base + self.style("faint")
                blank[len(blank) // 2] = _fit([Segment(words.center(width), style)], width, base)
            return [title, *blank]
        axis_rows = 1 if height >= 5 else 0
        rows = height - 1 - axis_rows
        place = raster.scale(axis.low, axis.high, rows if ascii_only() else 4 * rows, axis.log)
        values = raster.ticks(axis.low, axis.high, max(2, rows // 2), axis.log)
        if len(values) < 2 <= rows:  # one number alone says nothing of how far up or down it goes
            values = raster.ticks(axis.low, axis.high, 3, axis.log)
        labels = dict(zip(values, axis_labels(values, axis.log), strict=True))
        gutter = max((len(label) for label in labels.values()), default=1)
        window = self.window or (fetched[0].steps[0], fetched[0].steps[-1])
        grid = raster.Grid(max(1, width - gutter - 1), rows, plain=ascii_only())
        dot = to_dot(*window, grid.across)
        self._plot(grid, place, dot)
        cursor = dot(self.cursor) if self.cursor is not None and window[0] <= self.cursor <= window[1] else None
        strips = [title, *self._body(grid, labels, gutter, place, cursor)]
        if axis_rows:
            strips.append(self._axis(window, dot, cursor, gutter + 1, width))
        return strips

    def _plot(self, grid: raster.Grid, place: Place, dot: Callable[[int], int]) -> None:
        fetched = self.fetched
        # The first line is drawn last, so that it lies on top.
        for column in reversed(fetched):
            if column.smooth is not None:
                xs, low, high = by_column(column.steps, column.low, column.high, dot)
                raster.draw(grid, xs, low, high, place, column.tone + raster.FAINT, 0)
        for column in reversed(fetched):
            if column.smooth is None:
                drawn = by_column(column.steps, column.low, column.high, dot)
            else:
                xs, ends = newest_by_column(column.steps, column.smooth, dot)
                drawn = xs, ends, ends
            raster.draw(grid, *drawn, place, column.tone, column.tone)

    def _body(
        self, grid: raster.Grid, labels: dict[float, str], gutter: int, place: Place, cursor: int | None
    ) -> list[Strip]:
        base, plain = self.base, grid.plain
        axis = base + self.style("axis")
        at_row: dict[int, str] = {}
        for value, label in labels.items():
            dot = place(value)
            if dot is not None:
                at_row.setdefault(min(grid.rows - 1, max(0, dot if plain else dot // 4)), label)
        cursor_cell = -1 if cursor is None else cursor // (1 if plain else 2)
        strips = []
        for row in range(grid.rows):
            label = at_row.get(row) or ""
            edge = ("+" if plain else "┤") if label else ("|" if plain else "│")
            segments = [Segment(label.rjust(gutter) + edge, axis)]
            segments += self._row(grid, row, cursor_cell)
            strips.append(_fit(segments, gutter + 1 + grid.columns, base))
        return strips

    def _row(self, grid: raster.Grid, row: int, cursor_cell: int) -> list[Segment]:
        """One row of cells as runs of one style."""
        base, start = self.base, row * grid.columns
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

    def _axis(self, window: Window, dot: Callable[[int], int], cursor: int | None, left: int, width: int) -> Strip:
        """First and last step, what happened between them, and the step under the cursor."""
        base, room = self.base, width - left
        style = base + self.style("axis")
        first, last = count(window[0]), count(window[1])
        cells = list(" " * room)
        cells[: len(first)] = first
        if room > len(first) + len(last) + 2:
            cells[room - len(last) :] = last
        per = 1 if ascii_only() else 2
        for step, sign in self.marks:
            if window[0] <= step <= window[1]:
                cell = min(room - 1, dot(step) // per)
                if cells[cell] == " ":
                    cells[cell] = sign[:1]
        if cursor is not None and self.cursor is not None:
            label = count(self.cursor)
            start = min(max(0, cursor // per - len(label) // 2), max(0, room - len(label)))
            before, after = "".join(cells[:start]), "".join(cells[start + len(label) :])
            segments = [Segment(" " * left + before, style), Segment(label, base + self.style("cursor"))]
            return _fit([*segments, Segment(after, style)], width, base)
        return _fit([Segment(" " * left + "".join(cells[:room]), style)], width, base)

    def _title_strip(self, width: int, axis: Axis | None) -> Strip:
        """The values under the cursor, else a legend of several lines, else the title; then how the values are drawn."""
        log = bool(self.log_scale) if axis is None else axis.log
        beyond = f"beyond: {', '.join(map(number, axis.beyond))}" if axis and axis.beyond else ""
        flags = [word for word in ("log" if log else "", beyond, self.smoothing, "zoom" if self.zoomed else "") if word]
        flagged = "  " + " ".join(flags) if flags else ""
        room = max(width // 2, width - cell_len(flagged))
        if self.at is not None:
            segments = self._at_cursor(*self.at, room)
        elif len(self.lines) > 1:
            segments = self._legend(room)
        else:
            segments = [Segment(self._whole_title(room), self.base + self.style("title"))]
        if flagged:
            segments.append(Segment(flagged, self.base + self.style("axis")))
        return _fit(segments, width, self.base)

    def _whole_title(self, width: int) -> str:
        """The title; where it does not fit, its name is cut and not its value."""
        title, value = visible(self.title), visible(self.lines[0].brief) if self.lines else ""
        if cell_len(title) <= width or not value or not title.endswith(value):
            return title
        return f"{cut(title.removesuffix(value).rstrip(), width - cell_len(value) - 1)} {value}"

    def _at_cursor(self, first: int, last: int, values: list[Value], width: int) -> list[Segment]:
        """The step and each line's value there, by name; by sign where the names of several do not fit."""
        bold, signs = self.base + self.style("title"), self._signs
        step = f"step {count(first)}" if first == last else f"steps {count(first)}-{count(last)}"
        readings = [_between(value) for value in values]
        names = [visible(value.name) for value in values]
        if len(values) > 1 and sum(map(cell_len, [step, *names, *readings])) + 3 * len(values) > width:
            names = [signs[value.tone % len(signs)] for value in values]
        segments = [Segment(step, bold)]
        for name, text, value in zip(names, readings, values, strict=True):
            segments.append(Segment(f"  {name} ", self.base + self._line_style(value.tone)))
            segments.append(Segment(text, bold))
        return segments

    @property
    def _signs(self) -> Sequence[str]:
        return raster.STYLE_SIGNS_PLAIN if ascii_only() else raster.STYLE_SIGNS

    def _legend(self, width: int) -> list[Segment]:
        """Sign and label of each line for which there is room."""
        faint, bold = self.base + self.style("axis"), self.base + self.style("title")
        signs = self._signs
        segments = [Segment(f"{visible(self.title)}  ", bold)] if self.title else []
        left = width - sum(cell_len(segment.text) for segment in segments)
        labels = [visible(line.label or line.name) for line in self.lines]
        if (
            all(line.brief for line in self.lines)
            and sum(cell_len(label) + len(signs[0]) + 3 for label in labels) > left
        ):
            labels = [visible(line.brief) for line in self.lines]
        for index, (line, label) in enumerate(zip(self.lines, labels, strict=True)):
            tone = index if line.tone is None else line.tone
            sign = f"{signs[tone % len(signs)]} "
            room = left - cell_len(sign)
            if index and room < LEAST_LABEL:
                break
            label = cut(label, room)
            segments.append(Segment(sign, self.base + self._line_style(tone)))
            segments.append(Segment(f"{label}  ", bold if index == 0 else faint))
            left = room - cell_len(label) - 2
        return segments

    def _line_style(self, line: int) -> Style:
        if line == -2:
            return self.style("axis")
        if line < 0:
            return Style.null()
        return self.style("faint") if line >= raster.FAINT else self.style(f"line-{line % 4}")


def _between(value: Value) -> str:
    low, high = number(value.low), number(value.high)
    return (low if low == high else f"{low} to {high}") + (f" {value.unit}" if value.unit else "")


def axis_labels(values: Sequence[float], log: bool) -> list[str]:
    """Labels of an axis; of a logarithmic one each as short as it can be, unless two would be the same."""
    labels = [raster.tick_labels([value])[0] for value in values] if log else []
    return labels if len(set(labels)) == len(values) else raster.tick_labels(values)


def _fit(segments: list[Segment], width: int, base: Style) -> Strip:
    return Strip(segments).adjust_cell_length(width, base).simplify()
