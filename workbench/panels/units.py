"""Metrics in words: what they are called, their values with units, and curves counted in those units; also for commands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import visible
from engine.figures import brief, number, size
from engine.run.curves import words
from engine.run.series import Series


def titled(name: str) -> str:
    """A metric's name in words, safe to draw."""
    return visible(words(name).title)


def worded(name: str, value: float | None) -> str:
    """A metric's value with its unit."""
    unit = words(name).unit
    if unit == "bytes":
        return size(value)
    if unit == "share" and value is not None and math.isfinite(value):
        return f"{100 * value:.1f}".removesuffix(".0") + " %"
    return brief(value) if unit == "seconds" else number(value)


IN_UNIT = {"bytes": 2.0**-30, "share": 100.0}
SIGNS = {"bytes": "GiB", "share": "%", "seconds": "s"}


@dataclass(frozen=True)
class Scaled:
    """A series of bytes as GiB, or of shares as percent, so that the axis counts in the unit of the title."""

    series: Series
    factor: float

    def points(
        self, start: int | None = None, stop: int | None = None, width: int | None = None
    ) -> tuple[Sequence[int], Sequence[float], Sequence[float]]:
        """As the series gives them, times the factor."""
        steps, low, high = self.series.points(start, stop, width)
        return steps, [value * self.factor for value in low], [value * self.factor for value in high]


def in_unit(name: str, series: Series) -> Series | Scaled:
    """What a chart draws of a series."""
    factor = IN_UNIT.get(words(name).unit)
    return Scaled(series, factor) if factor else series


def unit_of(name: str) -> str:
    """What a chart counts a metric in; nothing for a plain number."""
    return SIGNS.get(words(name).unit, "")
