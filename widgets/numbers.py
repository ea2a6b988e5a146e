"""Numbers as people read them: with units, never wider than they need to be."""

from __future__ import annotations

from engine.run.sizes import size_text, time_text


def count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def large(value: float | None) -> str:
    """812, 9,812, 10.1 M."""
    if value is None:
        return "-"
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:,.0f}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def size(value: float | None) -> str:
    return "-" if value is None else size_text(int(value))


def duration(seconds: float | None) -> str:
    """0:42, 12:05, 3:04:05."""
    return "-" if seconds is None else time_text(seconds)
