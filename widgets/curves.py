"""Which curves a monitor draws, in which order, with which words: the method's own beside those that every run has."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from engine.errors import visible
from engine.run.curves import label_of, leading, ordered
from engine.run.view import RunView

MOST = 24

# Counted up for ever: a value to read, not a curve.
UNDRAWN = re.compile(r"(eval_)?(tokens|trained_tokens|num_tokens|runtime)|eval_\w+_per_second|(?!tokens)\w+_per_second")


def drawn(names: Iterable[str]) -> list[tuple[str, str, str]]:
    """(name, title, unit) of those of these metrics that are curves and not counts or readings of a device."""
    curves = []
    for name in names:
        if not UNDRAWN.fullmatch(name) and not name.startswith("gpu"):
            known = label_of(name)
            curves.append((name, visible(known.title)[:60], {"seconds": "brief"}.get(known.unit, known.unit)))
    return curves


def entries(view: RunView) -> list[dict[str, Any]]:
    """The curves of a run, those that matter most for its method first; `with` names the chart a curve is drawn into."""
    names = [name for name, _, _ in drawn(view.series)]
    if not names:
        return []
    beside = {name: group[0] for group in leading(view.method, names) for name in group[1:]}
    curves = []
    for name, title, unit in drawn(ordered(view.method, names)[:MOST]):
        twin = name.removeprefix("eval_")
        into = beside.get(name, twin if twin != name and twin in view.series else "")
        curves.append({"name": name, "title": title, "unit": unit, "with": into})
    return curves


def devices(view: RunView) -> list[list[str]]:
    """The newest word of each GPU, and of each rank of several, as label and value."""
    from engine.figures import brief, count, percent, size

    rows = []
    for device in view.gpu[:16]:
        parts = []
        if isinstance(device.get("load"), int | float):
            parts.append(f"{device['load']:.0f} %")
        if isinstance(device.get("memory_used"), int | float):
            parts.append(size(device["memory_used"]))
        if isinstance(device.get("temperature"), int | float):
            parts.append(f"{device['temperature']:.0f} °C")
        if isinstance(device.get("power"), int | float):
            parts.append(f"{device['power']:.0f} W")
        rows.append([f"GPU {device.get('index', '')}", "  ·  ".join(parts)])
    for number, rank in enumerate(view.ranks[:16]):
        figures = (
            ("tokens_per_second", lambda rate: f"{count(rate)} tokens/s"),
            ("data_seconds", lambda seconds: f"data {brief(seconds)}"),
            ("forward_seconds", lambda seconds: f"forward {brief(seconds)}"),
            ("memory", size),
            ("communication_share", lambda share: f"comm wait {percent(share, 1)}"),
        )
        parts = [show(rank[name]) for name, show in figures if rank[name] is not None]
        late = view.slowest is not None and view.slowest[0] == number
        rows.append([f"rank {number}{', slowest' if late else ''}", "  ·  ".join(parts)])
    return rows
