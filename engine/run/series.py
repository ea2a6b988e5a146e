"""One curve in bounded memory: the newest points as they are, older ones as minimum and maximum of ever larger groups.

Level 0 holds points, level k groups of 8^k of them; each level keeps its newest few thousand entries, so that neither
memory nor the cost of drawing grows with the run. A curve depends only on the points, never on how they arrived.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

FACTOR = 8
KEEP_POINTS = 10_240
KEEP_GROUPS = 2_048
LEVELS = 9


class _Level:
    """Entries `dropped .. dropped + len(steps)` of this level; `steps` are the last step of each entry."""

    __slots__ = ("dropped", "high", "keep", "low", "steps")

    def __init__(self, keep: int, *, points: bool = False) -> None:
        self.keep = keep
        self.dropped = 0
        self.steps = array("q")
        self.low = array("d")
        # Points have one value; only groups need a second column.
        self.high = self.low if points else array("d")

    @property
    def count(self) -> int:
        return self.dropped + len(self.steps)

    def add(self, step: int, low: float, high: float) -> None:
        self.steps.append(step)
        self.low.append(low)
        if self.high is not self.low:
            self.high.append(high)

    def trim(self) -> None:
        if len(self.steps) >= 2 * self.keep:
            self._delete(0, self.keep)
            self.dropped += self.keep

    def cut(self, count: int) -> None:
        """Keep the first `count` entries, counted from the start of the run."""
        if count < self.dropped:
            self._delete(0, len(self.steps))
            self.dropped = count
        else:
            self._delete(count - self.dropped, len(self.steps))

    def _delete(self, start: int, stop: int) -> None:
        del self.steps[start:stop]
        del self.low[start:stop]
        if self.high is not self.low:
            del self.high[start:stop]

    def columns(self) -> tuple[array[Any], ...]:
        return (self.steps, self.low) if self.high is self.low else (self.steps, self.low, self.high)


class Series:
    """Append with `add`; look with `points`, `last` and `len`. Steps never go back but by `cut_after`."""

    __slots__ = ("_levels",)

    def __init__(self) -> None:
        self._levels = [_Level(KEEP_POINTS, points=True)]

    def __len__(self) -> int:
        """How many points the curve stands for."""
        return self._levels[0].count

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Series) and self.as_columns() == other.as_columns()

    @property
    def last(self) -> tuple[int, float] | None:
        for level in self._levels:
            if level.steps:
                return level.steps[-1], level.high[-1]
        return None

    def add(self, step: int, value: float) -> bool:
        """Take one point; refuses a step before the last one."""
        level = self._levels[0]
        steps = level.steps
        if steps and step < steps[-1]:
            return False
        steps.append(step)
        level.low.append(value)
        if not len(steps) % FACTOR and not level.count % FACTOR:
            self._group()
        return True

    def _group(self) -> None:
        """Every full group of eight becomes one entry of the level above, and so on upwards."""
        levels = self._levels
        for depth in range(LEVELS - 1):
            level = levels[depth]
            if level.count % FACTOR:
                return
            if len(levels) == depth + 1:
                levels.append(_Level(KEEP_GROUPS))
            levels[depth + 1].add(level.steps[-1], min(level.low[-FACTOR:]), max(level.high[-FACTOR:]))
            level.trim()

    def cut_after(self, step: int) -> int:
        """Forget every point above `step` (a resumed run takes another way from there); returns how many.

        Exact where the points themselves are still kept; further back whole groups go.
        """
        before = len(self)
        keep = 0
        for depth, level in enumerate(self._levels):
            place = bisect_right(level.steps, step)
            keep = (level.dropped + place) * FACTOR**depth
            if place or not level.dropped:
                break
        for depth, level in enumerate(self._levels):
            level.cut(keep // FACTOR**depth)
        while len(self._levels) > 1 and not self._levels[-1].count:
            self._levels.pop()
        return before - keep

    def points(
        self, start: int | None = None, stop: int | None = None, width: int | None = None
    ) -> tuple[Sequence[int], Sequence[float], Sequence[float]]:
        """(steps, low, high) between two steps (both included), about `width` entries; without `width` all that is kept.

        Takes the coarsest level that still fills `width`, so the cost does not depend on the length of the run.
        """
        depth = self._depth(start, stop, width)
        steps, low, high = array("q"), array("d"), array("d")
        # The level itself, then what is not yet a full group in it, from the levels below.
        done = 0
        for level in reversed(self._levels[: depth + 1]):
            first = max(0, done * FACTOR - level.dropped)
            left = first if start is None else max(first, bisect_left(level.steps, start))
            right = len(level.steps) if stop is None else bisect_right(level.steps, stop)
            if left < right:
                steps += level.steps[left:right]
                low += level.low[left:right]
                high += level.high[left:right]
            done = level.count
        if width is None or len(steps) <= width:
            return steps, low, high
        return _binned(steps, low, high, width)

    def _depth(self, start: int | None, stop: int | None, width: int | None) -> int:
        for depth, level in enumerate(self._levels):
            covers = not level.dropped or (start is not None and bool(level.steps) and level.steps[0] < start)
            if not covers and depth + 1 < len(self._levels):
                continue
            if width is None:
                return depth
            left = 0 if start is None else bisect_left(level.steps, start)
            right = len(level.steps) if stop is None else bisect_right(level.steps, stop)
            if right - left <= width * FACTOR:
                return depth
        return len(self._levels) - 1

    def as_columns(self) -> list[tuple[int, tuple[array[Any], ...]]]:
        """(dropped entries, columns) of each level: what the index stores."""
        return [(level.dropped, level.columns()) for level in self._levels]

    @classmethod
    def from_columns(cls, levels: list[tuple[int, tuple[array[Any], ...]]]) -> Series:
        series = cls()
        for depth, (dropped, columns) in enumerate(levels):
            if depth:
                series._levels.append(_Level(KEEP_GROUPS))
            level = series._levels[depth]
            level.dropped = dropped
            level.steps, level.low = columns[0], columns[1]
            level.high = columns[2] if depth else columns[1]
        return series

    def copy(self) -> Series:
        return Series.from_columns(
            [(dropped, tuple(array(c.typecode, c) for c in columns)) for dropped, columns in self.as_columns()]
        )


def _binned(
    steps: Sequence[int], low: Sequence[float], high: Sequence[float], width: int
) -> tuple[Sequence[int], Sequence[float], Sequence[float]]:
    """Entries merged into at most `width` equal spans of steps."""
    first = steps[0]
    span = (steps[-1] - first + 1) / width
    out_steps, out_low, out_high = array("q"), array("d"), array("d")
    left, count = 0, len(steps)
    for bin in range(1, width + 1):
        right = count if bin == width else bisect_left(steps, first + span * bin, left)
        if right > left:
            out_steps.append(steps[right - 1])
            out_low.append(min(low[left:right]))
            out_high.append(max(high[left:right]))
            left = right
    return out_steps, out_low, out_high
