"""A label and a value of each of several things: in columns where every value fits into its own, else a line for each.

Pure text for the app and for commands. A value is never broken to fit a column: what is too wide for its column stands
whole on a line of its own, behind the sign of what it belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size

GAP = 2
INDENT = "  "

Row = tuple[str, str]
"""What a line begins with (the label, or the sign of one thing), and the rest of it."""


def beside(label: str, cells: Sequence[str], signs: Sequence[str], first: int, width: int) -> list[Row]:
    """A label and its cells in columns behind `first` cells; below a label that is longer, a line each where one is wider."""
    room = max(1, (width - first) // max(1, len(cells)))
    if all(cell_len(cell) <= room - GAP for cell in cells):
        columns = "".join(set_cell_size(cell, room) for cell in cells).rstrip()
        if cell_len(label) <= first - GAP:
            return [(set_cell_size(label, first), columns)]
        return [(label, ""), (" " * first, columns)]
    rows = [(f"{INDENT}{sign}  ", cell) for sign, cell in zip(signs, cells, strict=True)]
    return [(label, ""), *rows] if label else rows
