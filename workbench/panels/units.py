"""Curves counted in the units of their metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.run.curves import label_of
from engine.run.series import Series

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
    factor = IN_UNIT.get(label_of(name).unit)
    return Scaled(series, factor) if factor else series


def unit_of(name: str) -> str:
    """What a chart counts a metric in; nothing for a plain number."""
    return SIGNS.get(label_of(name).unit, "")
