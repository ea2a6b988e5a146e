"""Lines to characters: places values on a grid of braille dots (2x4 a cell) or, in plain terminals, of ASCII cells.

Pure functions, no Textual. A column of the grid holds the lowest and the highest value of the points that fall into
it, so a spike of one step is never lost however long the run is. A value that is not finite is a gap.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

# Bit of each dot of a braille cell: [column][row from the top].
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
# (drawn, left out) dots along the line: solid, dashed, dotted, dash-dot, sparse dots, long and short, dash-dot-dot, short
# dashes. Style tells lines apart without colour; where colours begin anew, two of one colour are the least alike.
STYLES: tuple[tuple[bool, ...], ...] = (
    (True,),
    (True, True, True, True, False, False, False),
    (True, False, False),
    (True, True, True, True, True, False, False, True, False, False),
    (True, False, False, False, False, False, False),
    (True, True, True, True, True, True, True, True, False, False, True, True, True, False, False),
    (True, True, True, True, True, False, False, True, False, False, True, False, False),
    (True, True, False, False),
)
STYLE_SIGNS = ("──", "╌╌", "··", "─·", "┈┈", "─╌", "╌·", "╴╴")
STYLE_SIGNS_PLAIN = ("--", "- ", "..", "-.", "::", "=-", "-:", "==")
FAINT = 90  # added to a line's number: the raw values behind a smoothed line; the line itself wipes them from its cells


@dataclass
class Grid:
    """`columns` x `rows` cells; `bits` are the dots of each cell, `owner` is the line that a cell is coloured for."""

    columns: int
    rows: int
    plain: bool = False
    bits: list[int] = field(default_factory=list)
    owner: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.bits = [0] * (self.columns * self.rows)
        self.owner = [-1] * (self.columns * self.rows)

    @property
    def across(self) -> int:
        """Dots in a row."""
        return self.columns if self.plain else 2 * self.columns

    @property
    def down(self) -> int:
        """Dots in a column."""
        return self.rows if self.plain else 4 * self.rows

    def column(self, x: int, top: int, bottom: int, line: int) -> None:
        """Sets the dots `top`..`bottom` (both included, 0 is the top) of dot column `x`."""
        if not 0 <= x < self.across:
            return
        top, bottom = max(0, top), min(self.down - 1, bottom)
        if self.plain:
            for y in range(top, bottom + 1):
                self.bits[y * self.columns + x] = 1
                self.owner[y * self.columns + x] = line
            return
        dots, cell = _DOTS[x & 1], x >> 1
        for y in range(top, bottom + 1):
            place = (y >> 2) * self.columns + cell
            if line < FAINT <= self.owner[place]:
                self.bits[place] = 0
            self.bits[place] |= dots[y & 3]
            self.owner[place] = line


def scale(low: float, high: float, dots: int, log: bool = False) -> Callable[[float], int | None]:
    """A function from a value to its dot row (0 is the top); None where the value has no place on the scale."""
    if log:
        low, high = math.log10(low), math.log10(high)
    span = (high - low) or 1.0
    last = dots - 1

    def place(value: float) -> int | None:
        if log:
            if not value > 0:
                return None
            value = math.log10(value)
        if not math.isfinite(value):
            return None
        # Clamped: a value far outside a zoomed window must not make a loop of a million dots.
        return min(last + 1, max(-1, round((high - value) / span * last)))

    return place


def draw(
    grid: Grid,
    xs: Sequence[int],
    low: Sequence[float],
    high: Sequence[float],
    place: Callable[[float], int | None],
    line: int,
    style: int = 0,
    joined: bool = True,
) -> None:
    """Draws one line through dot columns `xs` (ascending), each spanning its lowest to its highest value.

    Neighbours are joined; a gap on either side leaves the place empty, and a point alone between gaps is drawn thick
    enough to be seen.
    """
    pattern = STYLES[style % len(STYLES)]
    before: tuple[int, int, int] | None = None  # x, top, bottom of the last column drawn
    alone = False
    for x, bottom_value, top_value in zip(xs, low, high, strict=True):
        bottom, top = place(bottom_value), place(top_value)
        if bottom is None or top is None:
            if alone and before:
                _dot(grid, before, line)
            before, alone = None, False
            continue
        if before is None or not joined:
            if alone and before and not joined:
                _dot(grid, before, line)
            alone = True
            _span(grid, x, top, bottom, line, pattern)
        else:
            alone = False
            _join(grid, before, (x, top, bottom), line, pattern)
        before = (x, top, bottom)
    if alone and before:
        _dot(grid, before, line)


def _span(grid: Grid, x: int, top: int, bottom: int, line: int, pattern: tuple[bool, ...]) -> None:
    if pattern[x % len(pattern)]:
        grid.column(x, top, bottom, line)


def _dot(grid: Grid, where: tuple[int, int, int], line: int) -> None:
    x, top, bottom = where
    grid.column(x, top, max(bottom, top + (0 if grid.plain else 1)), line)
    if not grid.plain:
        grid.column(x + 1 if x % 2 == 0 else x - 1, top, max(bottom, top + 1), line)


def _join(
    grid: Grid, before: tuple[int, int, int], now: tuple[int, int, int], line: int, pattern: tuple[bool, ...]
) -> None:
    """The column `now` and the slope that leads to it from `before`."""
    x0, top0, bottom0 = before
    x1, top1, bottom1 = now
    if x1 - x0 <= 1:
        if top1 > bottom0 + 1:
            top1 = bottom0 + 1
        elif bottom1 < top0 - 1:
            bottom1 = top0 - 1
        _span(grid, x1, top1, bottom1, line, pattern)
        return
    start, end = (top0 + bottom0) / 2, (top1 + bottom1) / 2
    last = start
    for x in range(x0 + 1, x1):
        y = start + (end - start) * (x - x0) / (x1 - x0)
        first, second = round(min(last, y)), round(max(last, y))
        if second > first and y > last:
            first += 1
        elif second > first:
            second -= 1
        _span(grid, x, first, second, line, pattern)
        last = y
    joint = round(last)
    _span(grid, x1, min(top1, joint + 1 if joint < top1 else top1), max(bottom1, joint - 1), line, pattern)


def ticks(low: float, high: float, most: int, log: bool = False) -> list[float]:
    """Rounded values within low..high, at most about `most`: steps of 1, 2 or 5 times a power of ten."""
    if not (math.isfinite(low) and math.isfinite(high)) or high < low or most < 1:
        return []
    if high == low:
        return [low]
    if log and low > 0 and high / low >= 8:
        values: list[float] = []
        for parts in ((1, 2, 5), (1, 3), (1,)):
            first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
            values = [m * 10.0**e for e in range(first, last + 1) for m in parts if low <= m * 10.0**e <= high]
            if len(values) <= most:
                break
        every = max(1, math.ceil(len(values) / most))
        return values[::every]
    return _linear_ticks(low, high, most)


def _linear_ticks(low: float, high: float, most: int) -> list[float]:
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    best: list[float] = []
    for factor in (0.5, 1, 2, 5, 10):
        step = factor * power
        first = math.ceil(low / step - 1e-9)
        last = math.floor(high / step + 1e-9)
        best = [
            round(index * step, 12) if abs(index * step) > 1e-9 else index * step for index in range(first, last + 1)
        ]
        if len(best) <= most:
            break
    return best


def tick_labels(values: Sequence[float]) -> list[str]:
    """Labels of equal precision, as short as keeps them apart."""
    if not values:
        return []
    biggest = max(abs(value) for value in values)
    if biggest >= 1e6 or (0 < biggest < 1e-3):
        return [_short(value) for value in values]
    gaps = [abs(b - a) for a, b in itertools.pairwise(values) if b != a]
    smallest = min(gaps) if gaps else (biggest or 1.0)
    places = min(8, max(0, -math.floor(math.log10(smallest) + 1e-9))) if smallest < 1 else 0
    while places < 8 and any(abs(round(value, places) - value) > smallest * 0.01 for value in values):
        places += 1
    return [f"{value:,.{places}f}" for value in values]


def _short(value: float) -> str:
    if value == 0:
        return "0"
    for unit, scale_by in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= scale_by:
            return f"{value / scale_by:g}{unit}"
    if abs(value) >= 1e-3:
        return f"{value:g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
