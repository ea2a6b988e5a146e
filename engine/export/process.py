"""The frontends' end of an export: the process that does it, what it is asked, what it found. No torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.errors import WorkbenchError, visible
from engine.figures import number, percent, size
from engine.run.task import Task

COMMAND = (sys.executable, "-P", "-m", "engine.export")
ENVIRONMENT = {
    # The C library would keep the room of each weight that is done, for one of another size: twice the memory in the end.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
}


class Export(Task):
    """One export; a cancelled one takes its half-written part away, parts that are complete stay."""

    what = "export"
    cancelled = "Cancelled: what was being written is gone; parts that were complete are kept."

    def __init__(self, request: dict[str, Any], command: Sequence[str] = COMMAND) -> None:
        super().__init__(request, command, ENVIRONMENT)


def request(
    do: str, run: Path, *, checkpoint: int | None = None, places: dict[str, Path] | None = None, **more: Any
) -> dict[str, Any]:
    """What the process is asked: `do` is `merge`, `export` or `push`."""
    where = {form: str(path) for form, path in (places or {}).items()}
    return {"do": do, "run": str(run), "checkpoint": checkpoint, "places": where, **more}


def compared(parity: dict[str, Any]) -> str:
    """What a comparison found, in a sentence."""
    words = f"opened again by {parity['reader']}"
    formats = parity.get("formats") or {}
    if parity.get("requantized") is not None:
        words += f": {parity['weights']} weights are what they were rounded to"
    elif parity["weights"] is not None:
        rounded = ", ".join(f"{count} {name}" for name, count in formats.items())
        words += f": {parity['weights']} weights {f'({rounded}) ' if rounded else ''}are their source's"
        words += f"{' to rounding' if rounded else ''}, tokens and template are the same"
    elif parity["prompts"] or parity["probes"]:
        words += f": {parity['prompts']} prompts and {parity['probes']} texts are the same"
    if parity["logits_error"] is not None:
        words += f", logits differ by {percent(parity['logits_error'], 3)} of their size{' in the middle position' if parity.get('middle') else ''}"
        words += "" if parity["bound"] is None else f" (at most {percent(parity['bound'], 2)})"
        if parity["rounding_effect"] is not None:
            words += f" from those of the trained weights rounded alike, rounding moved them by {percent(parity['rounding_effect'], 1)}"
    if parity.get("divergence") is not None:
        words += f", next tokens by {number(parity['divergence'], 3)} nats ({'KL of the middle position' if parity.get('middle') else 'mean KL'})"
    if (error := parity.get("file_error")) is not None:
        words += f", with the same numbers in float32 logits by {percent(error, 3)}"
    elif (reason := parity.get("not_in_float32")) is not None:
        words += f", not compared in float32 ({reason})"
    if parity["trained_effect"] is not None:
        words += f", training moved them by {percent(parity['trained_effect'], 1)}"
    for each in parity.get("requantized") or ():
        words += (
            f"; {visible(each['kind'])} rounded by {percent(each['error'], 2)} of its size, moved {number(each['kept'], 2)} times as "
            f"far as trained (cosine {number(each['cosine'], 2)})"
        )
    return f"{words}; it stops at {' '.join(map(visible, parity['stop_tokens'])) or 'no token'}."


def part_summary(part: dict[str, Any]) -> str:
    """What became of one form, in words."""
    if not part["ok"]:
        return visible(
            f"✗ {part['form']}: {WorkbenchError(**part['error']).full_message.removeprefix(part['form'] + ': ')}"
        )
    notes = " ".join(part.get("notes", ()))
    return visible(f"✓ {part['form']} ({size(part['bytes'])}), {compared(part['parity'])} {notes}".rstrip())
