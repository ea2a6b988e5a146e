"""A line of a chart as it is drawn in a window: fetched, smoothed, brought to one point a dot column.

It knows series and numbers, neither colours nor cells. What a series gives for a window is already decimated, so nothing
here grows with the length of the run.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

SMOOTHINGS: tuple[str, ...] = ("", "mean", "median")
_SMOOTH_FROM = 40  # fewer points than this are all drawn as they are: smoothing would bend a line of evaluations


class Points(Protocol):
    """What the chart needs of a series; `engine.run.view.Series` is one."""

    def points(
        self, start: int | None = None, stop: int | None = None, width: int | None = None
    ) -> tuple[Sequence[int], Sequence[float], Sequence[float]]: ...


@dataclass(frozen=True)
class Line:
    """One line of a chart; `stamp` changes whenever the series has changed, `label` stands in the legend, `brief` where
    labels do not fit, `unit` behind a value under the cursor. `tone` numbers the colour and the sign of a line that keeps
    them also where others are not there.
    """

    name: str
    series: Points
    stamp: object = None
    label: str = ""
    brief: str = ""
    unit: str = ""
    tone: int | None = None


class Value(NamedTuple):
    """A line at the cursor: the lowest and the highest of what one drawn point stands for."""

    name: str
    low: float
    high: float
    tone: int = 0
    unit: str = ""


@dataclass
class Fetched:
    """One line as fetched for the present window: steps ascending, lowest and highest value of each."""

    name: str
    steps: Sequence[int]
    low: Sequence[float]
    high: Sequence[float]
    tone: int = 0
    unit: str = ""
    smooth: list[float] | None = None


def fetch(line: Line, start: int | None, stop: int | None, fine: int, smoothing: str, place: int = 0) -> Fetched:
    """The line between two steps in about `fine` points, smoothed in one of the `SMOOTHINGS`; `place` among the others."""
    steps, low, high = line.series.points(start, stop, fine)
    fetched = Fetched(line.name, steps, low, high, place if line.tone is None else line.tone, line.unit)
    if smoothing and len(steps) > _SMOOTH_FROM:
        fetched.smooth = smoothed([(a + b) / 2 for a, b in zip(low, high, strict=True)], smoothing)
    return fetched


Window = tuple[int, int]


class Curves:
    """The lines of one chart in a window of steps, and what stands under its cursor."""

    def __init__(self) -> None:
        self.lines: tuple[Line, ...] = ()
        self.zoomed: Window | None = None
        """First and last step shown; nothing follows the whole run."""
        self.smoothing = ""
        self._fetched: list[Fetched] = []
        self._fetched_for: object = None

    @property
    def apart(self) -> bool:
        """Whether these are lines of several runs, which have each their own steps."""
        return any(line.tone is not None for line in self.lines)

    @property
    def extent(self) -> Window | None:
        """First and last step of all lines. A coarse point is named by its last step, so the first is looked at finely."""
        ends = []
        for line in self.lines:
            steps = line.series.points(width=64)[0]
            if len(steps):
                ends.append((line.series.points(None, steps[0])[0][0], steps[-1]))
        return (min(a for a, _ in ends), max(b for _, b in ends)) if ends else None

    def move(self, start: int, width: int) -> None:
        """The window begins at `start` and is so many steps wide, as far as the lines go."""
        whole = self.extent
        if whole is None or width >= whole[1] - whole[0]:
            self.zoomed = None
        else:
            start = min(max(start, whole[0]), whole[1] - width)
            self.zoomed = (start, start + width)

    def fetched(self, width: int) -> list[Fetched]:
        """The lines of the present window, decimated for so many cells; fetched once per change."""
        fine = max(16, 2 * width) * (4 if self.smoothing else 1)
        key = (self.lines, self.zoomed, fine, self.smoothing)
        if key != self._fetched_for:
            start, stop = self.zoomed or (None, None)
            curves = (fetch(line, start, stop, fine, self.smoothing, place) for place, line in enumerate(self.lines))
            self._fetched, self._fetched_for = list(curves), key
        return self._fetched

    def steps(self, width: int) -> Sequence[int]:
        """Where a cursor may stand."""
        columns = self.fetched(width)
        if self.apart:
            return sorted({step for column in columns for step in column.steps})
        return columns[0].steps if columns else ()

    def at(self, cursor: int, width: int) -> tuple[int, int, list[Value]]:
        """First and last step of the drawn point under the cursor, and each line's lowest and highest value there.

        A drawn point may stand for many steps; it is named by its last one.
        """
        first, last, values = cursor, cursor, []
        for index, column in enumerate(self.fetched(width)):
            place = min(bisect_left(column.steps, cursor), len(column.steps) - 1)
            if place < 0 or (self.apart and cursor > column.steps[-1]):  # a run that had ended by then
                continue
            if index == 0 and not self.apart:
                behind = column.steps[place - 1] + 1 if place else None
                inside = self.lines[0].series.points(behind, column.steps[place])[0]
                if len(inside) > 1 and not self.smoothing:
                    first, last = inside[0], column.steps[place]
            values.append(Value(column.name, column.low[place], column.high[place], column.tone, column.unit))
        return first, last, values


def smoothed(values: Sequence[float], how: str) -> list[float]:
    """A running `mean` (exponential, weight 0.9) or `median` (of nine); gaps stay gaps and start afresh."""
    result: list[float] = []
    kept: list[float] = []
    mean = math.nan
    for value in values:
        if not math.isfinite(value):
            kept.clear()
            mean = math.nan
            result.append(math.nan)
        elif how == "median":
            kept.append(value)
            del kept[:-9]
            result.append(statistics.median(kept))
        else:
            mean = value if math.isnan(mean) else 0.9 * mean + 0.1 * value
            result.append(mean)
    return result


MANY = 20
"""Points from which the axis is chosen by most of them."""
STRETCHED = 3.0
"""By how much a few points must stretch the axis before they are left beyond it."""


class Axis(NamedTuple):
    """The range of values that is drawn, and how."""

    low: float
    high: float
    log: bool
    beyond: tuple[float, ...] = ()
    """The highest and the lowest value, as far as they lie beyond the range."""


def axis_of(columns: Sequence[Fetched], log: bool | None) -> Axis | None:
    """The axis for all lines; None where no finite value has a place on it.

    With `log` None the values decide, once there are `MANY`: a curve most of which lies at the foot of its range is drawn on a
    log scale, and single points that would stretch the range are left beyond it. Else every value has its place.
    """
    lows = sorted(v for c in columns for v in c.low if math.isfinite(v) and (v > 0 or not log))
    highs = sorted(v for c in columns for v in c.high if math.isfinite(v) and (v > 0 or not log))
    if not lows or not highs:
        return None
    low, high = lows[0], highs[-1]
    if log is not None or len(lows) < MANY:
        return Axis(*_opened(low, high, bool(log)), bool(log))
    few = max(1, len(lows) // 50)
    most = lows[few], highs[-1 - few]
    middle = lows[len(lows) // 2]
    by_log = low > 0 and most[1] >= 20 * most[0] and middle <= most[0] + 0.1 * (most[1] - most[0])
    to, back = (math.log10, lambda value: 10.0**value) if by_log else (float, float)
    span, room = to(most[1]) - to(most[0]), (to(most[1]) - to(most[0])) / 10
    if span <= 0 or to(high) - to(low) <= STRETCHED * span:
        return Axis(*_opened(low, high, by_log), by_log)
    above, below = to(high) > to(most[1]) + room, to(low) < to(most[0]) - room
    return Axis(
        back(to(most[0]) - room) if below else low,
        back(to(most[1]) + room) if above else high,
        by_log,
        (*((high,) if above else ()), *((low,) if below else ())),
    )


def _opened(low: float, high: float, log: bool) -> tuple[float, float]:
    """A range, opened a little where its ends are one."""
    if high - low > 1e-12 * max(abs(high), abs(low)):
        return low, high
    if log:
        return low / 2, high * 2
    pad = abs(high) * 0.1 or 1.0
    return low - pad, high + pad


def to_dot(first: int, last: int, across: int) -> Callable[[int], int]:
    """The dot column of a step, where the window from `first` to `last` is `across` dots wide."""
    span = (last - first) or 1

    def dot(step: int) -> int:
        return round((step - first) / span * (across - 1))

    return dot


def by_column(
    steps: Sequence[int], low: Sequence[float], high: Sequence[float], to_dot: Callable[[int], int]
) -> tuple[list[int], list[float], list[float]]:
    """Points that fall on one dot column become one, keeping the lowest and the highest."""
    xs: list[int] = []
    lows: list[float] = []
    highs: list[float] = []
    for step, bottom, top in zip(steps, low, high, strict=True):
        x = to_dot(step)
        if xs and xs[-1] == x and not (math.isnan(bottom) or math.isnan(lows[-1])):
            lows[-1], highs[-1] = min(lows[-1], bottom), max(highs[-1], top)
        elif xs and xs[-1] == x:
            if math.isnan(lows[-1]):
                lows[-1], highs[-1] = bottom, top
        else:
            xs.append(x)
            lows.append(bottom)
            highs.append(top)
    return xs, lows, highs


def newest_by_column(
    steps: Sequence[int], values: Sequence[float], to_dot: Callable[[int], int]
) -> tuple[list[int], list[float]]:
    """A smoothed line stays thin: of the points on one dot column the newest."""
    by_column = {to_dot(step): value for step, value in zip(steps, values, strict=True)}
    return list(by_column), list(by_column.values())
