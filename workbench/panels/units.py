"""Metrics in words: what they are called, their values with units, and curves counted in those units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.run.curves import words
from engine.run.series import Series
from workbench.panels.figures import brief, number, size
from workbench.panels.paint import clean


def titled(name: str) -> str:
    """A metric's name in words, safe to draw."""
    return clean(words(name).title)


def worded(name: str, value: float | None) -> str:
    """A metric's value with its unit."""
    unit = words(name).unit
    if unit == "bytes":
        return size(value)
    return brief(value) if unit == "seconds" else number(value)


@dataclass(frozen=True)
class InGiB:
    """A series of bytes as GiB, so that the axis counts in the unit of the title."""

    series: Series

    def points(
        self, start: int | None = None, stop: int | None = None, width: int | None = None
    ) -> tuple[Sequence[int], Sequence[float], Sequence[float]]:
        """As the series gives them, divided by 2**30."""
        steps, low, high = self.series.points(start, stop, width)
        return steps, [value / 2**30 for value in low], [value / 2**30 for value in high]


def in_unit(name: str, series: Series) -> Series | InGiB:
    """What a chart draws of a series."""
    return InGiB(series) if words(name).unit == "bytes" else series
