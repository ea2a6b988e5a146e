"""Numbers as people read them, the same in app, notebook, commands and messages: rounded, with units, never wider than needed.

One decision worth knowing: bytes have at most three digits before the unit, so that 1,000 MiB are 1.0 GiB everywhere.
Standard library only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

NONE = "-"
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


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


def alternatives(values: Sequence[object]) -> str:
    """A choice in words: 2, 4 or 8."""
    words = [str(value) for value in values]
    return " or ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def large(value: float | None) -> str:
    """A count in at most six cells: 812, 24 k, 10.1 M."""
    if value is None:
        return NONE
    for unit, scale, least in (("T", 1e12, 1e12), ("B", 1e9, 1e9), ("M", 1e6, 1e6), ("k", 1e3, 1e4)):
        if abs(value) >= least:
            return f"{value / scale:.3g} {unit}"
    return f"{value:,.0f}"


def percent(share: float | None, places: int = 0) -> str:
    """A share of one as percent."""
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
    unit, scale = ("min", 60) if seconds < 3600 else ("h", 3600) if seconds < 48 * 3600 else ("d", 86400)
    return f"{seconds / scale:.0f} {unit}"


def size(amount: float | None) -> str:
    """Bytes in powers of 1024 with at most three digits: 19.4 GiB, 512 MiB, 0 B."""
    if amount is None:
        return NONE
    value, unit = float(amount), 0
    while unit < len(UNITS) - 1 and round(abs(value)) >= 1000:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {UNITS[unit]}" if unit == 0 or abs(value) >= 100 else f"{value:.1f} {UNITS[unit]}"


def size_of(used: float, total: float, between: str = " of ", places: int = 1) -> str:
    """A part of a whole in the unit of the whole: 0.7 of 23.5 GiB."""
    unit = size(total).split(" ")[1]
    scale = 1024 ** UNITS.index(unit)
    return f"{used / scale:.1f}{between}{total / scale:.{places}f} {unit}"


def plain(value: Any) -> str:
    """A value of any kind in a cell: on, 1,024, `all-linear`, ["q", "v"]."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int):
        return f"{value:,}"
    return value if isinstance(value, str) else json.dumps(value)


def unit_of(what: str) -> str:
    """What is counted while rows are prepared: bytes where they are read or fetched, here or by another process."""
    return "bytes" if what.rstrip(")").endswith(("reading", "fetching")) else "rows"


def progress(state: Mapping[str, Any]) -> str:
    """How far something is, counted in bytes, seconds or things: 1,200 of 24,000; 2.0 GiB of 4.0 GiB; 0:12 of 1:45; 12."""
    unit = state.get("unit")
    show = size if unit in ("bytes", "B") else duration if unit == "seconds" else count
    done, total = state.get("done"), state.get("total")
    return show(done or 0) + (f" of {show(total)}" if total else "")


def doing(state: Mapping[str, Any], what: str = "") -> str:
    """What is done, else `what`, and how far it is where something is counted: tokenizing: 1,200 of 24,000."""
    named = str(state.get("what") or what)
    return f"{named}: {progress(state)}" if state.get("done") or state.get("total") else named
