"""Bytes and seconds as a person reads them."""

from __future__ import annotations


def size_text(count: float | None) -> str:
    if count is None:
        return "unknown"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def time_text(seconds: float | None) -> str:
    """`0:42`, `12:07`, `3:10:00`, `2 d 4 h`."""
    if seconds is None:
        return "unknown"
    whole = max(0, int(seconds + 0.5))
    days, rest = divmod(whole, 86_400)
    hours, rest = divmod(rest, 3600)
    minutes, left = divmod(rest, 60)
    if days:
        return f"{days} d {hours} h"
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"
