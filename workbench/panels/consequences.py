"""What the config means in numbers, beside the form, with the change that the last edit made.

A row whose number is not known says why by a dash; the change stays until the next edit.
"""

from __future__ import annotations

from typing import Any

from rich.cells import cell_len

from workbench.panels.drawn import Drawn
from workbench.panels.figures import brief, count, percent
from workbench.panels.paint import Line

NARROW = 30
SIZES = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def size(value: float | None) -> str:
    """Bytes with three digits and a unit."""
    if value is None:
        return "-"
    for unit, scale in SIZES:
        if abs(value) >= scale:
            number = value / scale
            return f"{number:.0f} {unit}" if abs(number) >= 100 else f"{number:.1f} {unit}"
    return f"{value:.0f} B"


def of(value: float, room: float, *, narrow: bool = False) -> str:
    """A part of a whole, in the unit of the whole: 0.7 of 23.5 GiB."""
    unit, scale = next(((unit, scale) for unit, scale in SIZES if room >= scale), ("B", 1))
    return f"{value / scale:.1f}{'/' if narrow else ' of '}{room / scale:.1f} {unit}"


def large(value: float | None) -> str:
    """A count in at most six cells: 812, 10.1 M."""
    if value is None:
        return "-"
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(value) >= scale:
            return f"{value / (1e3 if unit == 'k' else scale):.3g} {unit}"
    return f"{value:,.0f}"


def _steps(value: float | None) -> str:
    return count(value)


# (label, attribute of the estimate, how it is written)
ROWS = (
    ("effective batch", "effective_batch", count),
    ("steps", "steps", _steps),
    ("tokens/epoch", "tokens_per_epoch", large),
    ("too long", "truncated_share", lambda share: percent(share, 1)),
    ("nothing to learn", "masked_rows", count),
    ("trainable", "trainable_parameters", large),
    ("memory", "memory_total", size),
    ("checkpoint", "checkpoint_bytes", size),
    ("checkpoints", "checkpoints_bytes", size),
    ("time, roughly", "seconds_left", brief),
)


class Consequences(Drawn):
    """The numbers of one estimate, and how they differ from the one before."""

    def __init__(self) -> None:
        super().__init__()
        self._now: Any = None
        self._before: Any = None
        self._height: float = 0

    def show(self, now: Any, before: Any) -> None:
        """Draw these two estimates; `before` may be nothing."""
        if now != self._now or before != self._before:
            self._now, self._before = now, before
            height = len(self.lines(max(20, self.size.width - 1))) + 1
            if height != self._height:
                self._height = self.styles.height = height
            self.redraw()

    def lines(self, width: int) -> list[Line]:
        """A line a number; what is not known at all is left out."""
        made: list[Line] = []
        if self._now is None:
            return [[("not known yet", "dim")]]
        for label, name, write in ROWS:
            value = getattr(self._now, name, None)
            if value is None or (name == "checkpoints_bytes" and width < NARROW):
                continue
            text = write(value)
            room = getattr(self._now, "device_bytes", None)
            fits = True
            if name == "memory_total" and room:
                fits = value <= room
                text = of(value, room, narrow=width < NARROW)
            change = self._change(name, value, write)
            shown = text if fits else f"{text} !"
            beside = f"({change}) " if change else ""
            gap = width - cell_len(label) - cell_len(beside) - cell_len(shown)
            style = "bad" if not fits else "accent" if change else "value"
            if gap >= 1:
                made.append([(label, "dim"), (" " * gap, ""), (beside, "accent"), (shown, style)])
            else:
                gap = max(1, width - cell_len(label) - cell_len(shown))
                made.append([(label, "dim"), (" " * gap, ""), (shown, style)])
                if change:
                    made.append([(f"{change} by this edit".rjust(width), "accent")])
        return made or [[("not known yet", "dim")]]

    def _change(self, name: str, value: float, write: Any) -> str:
        before = getattr(self._before, name, None) if self._before is not None else None
        if before is None or before == value:
            return ""
        difference = value - before
        text = write(abs(difference))
        return f"{'+' if difference > 0 else '−'}{text}" if text not in ("0", "0 B", "0 %", "0.0 %") else ""
