"""`kernels.json` of a run folder: the combinations that were timed and the one that was taken.

What does not fit the place it is read for, or is no table that `row` made, counts as absent and is timed anew. Where it
cannot be written the run goes on, and a resume of it times again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.config.kernels import LIGER_PARTS
from engine.errors import visible
from engine.features import liger_kernel
from engine.run.store import replace_file

FILE = "kernels.json"
PARTS = "parts"
"""Its key for those of Liger's parts that combinations have."""


def kept(folder: Path, place: dict[str, Any]) -> dict[str, Any] | None:
    """What an earlier segment of this run measured, if it was in the same place; None too where the file was damaged."""
    try:
        found = json.loads((folder / FILE).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or any(found.get(name) != value for name, value in place.items()):
        return None
    rows, parts, alone = found.get("table"), found.get(PARTS), found.get("parts_table")
    if not isinstance(rows, list) or not all(_is_row(row, place["free"]) for row in rows):
        return None
    if not isinstance(parts, list) or not all(part in LIGER_PARTS for part in parts):
        return None
    singly = [f"{liger_kernel.SETTING.name}.{part}" for part in LIGER_PARTS]
    if not isinstance(alone, list) or not all(
        _is_row(row, singly) and len(row["on"]) == (n > 0) for n, row in enumerate(alone)
    ):
        return None
    return found if found.get("chosen") in [row["on"] for row in rows if was_timed(row)] else None


def keep(folder: Path, found: dict[str, Any]) -> str:
    """Writes it whole; why it could not be written, for the receipt, or nothing."""
    try:
        replace_file(folder / FILE, json.dumps(found, indent=1) + "\n")
    except OSError as problem:
        return f"{FILE} could not be written ({visible(problem.strerror or str(problem))}), so a resume times again"
    return ""


def was_timed(row: dict[str, Any]) -> bool:
    """Whether a row of the table has a time, and so may be taken."""
    return row["both_ms"] is not None and not row["why"]


def _is_row(row: Any, free: list[str]) -> bool:
    """Whether it is what was written; a row without a finite time says why."""
    if not isinstance(row, dict) or not isinstance(row.get("why"), str) or not isinstance(row.get("on"), list):
        return False
    times = [row.get(name, "") for name in ("forward_ms", "both_ms", "first_s")]
    numbers = all(isinstance(time, float) for time in times) or (
        row["why"] and all(time is None or isinstance(time, float) for time in times)
    )
    return bool(numbers) and all(setting in free for setting in row["on"])
