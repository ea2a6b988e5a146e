"""Numbers as people read them: rounded, with units, and never wider than they need to be."""

from __future__ import annotations

import math

NONE = "-"


def number(value: float | None, digits: int = 3) -> str:
    """`digits` significant digits: 0.0312, 1.25, 9,812, 1.1e-4; a value that is not finite says so."""
    if value is None:
        return NONE
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 1e9 or size < 1e-3:
        return _scientific(value, digits)
    if size >= 100 or float(value).is_integer():
        return f"{value:,.0f}"
    places = max(0, digits - 1 - math.floor(math.log10(size)))
    return f"{value:.{places}f}"


def _scientific(value: float, digits: int) -> str:
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    if "." in mantissa:
        mantissa = mantissa.rstrip("0").rstrip(".")
    return f"{mantissa}e{int(exponent)}"


def count(value: float | None) -> str:
    """A whole number with thousands marked."""
    return NONE if value is None else f"{value:,.0f}"


def percent(share: float | None, places: int = 0) -> str:
    return NONE if share is None else f"{100 * share:.{places}f} %"


def duration(seconds: float | None) -> str:
    """0:42, 12:05, 3:04:05, 2 d 3 h."""
    if seconds is None or not math.isfinite(seconds):
        return NONE
    whole = max(0, round(seconds))
    if whole >= 48 * 3600:
        return f"{whole // 86400} d {whole % 86400 // 3600} h"
    if whole >= 3600:
        return f"{whole // 3600}:{whole % 3600 // 60:02}:{whole % 60:02}"
    return f"{whole // 60}:{whole % 60:02}"


def brief(seconds: float | None) -> str:
    """A time span in one unit: 208 ms, 4.1 s, 3 min, 2 h, 5 d."""
    if seconds is None or not math.isfinite(seconds):
        return NONE
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms" if seconds >= 0.01 or seconds == 0 else f"{seconds * 1000:.1f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    for unit, size in (("min", 60), ("h", 3600), ("d", 86400)):
        if seconds < size * {"min": 60, "h": 48, "d": 1e9}[unit]:
            return f"{seconds / size:.0f} {unit}"
    return NONE


def size(amount: float | None) -> str:
    """Bytes in powers of 1024 with at most three digits: 19.4 GiB, 512 MiB, 0 B."""
    if amount is None:
        return NONE
    value = float(amount)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def size_of(used: float | None, total: float | None) -> str:
    """Two amounts in the unit of the larger: 19.4 of 79.2 GiB."""
    if used is None or not total:
        return size(used)
    unit = size(total).rsplit(" ", 1)[1]
    scale = 1024 ** ["B", "KiB", "MiB", "GiB", "TiB"].index(unit)
    return f"{used / scale:.1f} of {size(total)}"
