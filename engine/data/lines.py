"""Lines and columns of places in a large file, without counting the file again for each place.

Newlines are counted once a block, up to the furthest block that somebody asked about. Standard library only.
"""

from __future__ import annotations

import mmap
from array import array

BLOCK = 1 << 20


class Lines:
    """The line and column, from 1, of a byte offset."""

    def __init__(self, data: mmap.mmap | bytes) -> None:
        self._data = data
        self._before = array("Q", [0])
        """Newlines before each block."""

    def place(self, offset: int) -> tuple[int, int]:
        block = offset // BLOCK
        before = self._before
        if len(before) <= block:
            # A copy grows and takes its place when it is whole: threads that race only count twice.
            before = before[:]
            for start in range((len(before) - 1) * BLOCK, block * BLOCK, BLOCK):
                before.append(before[-1] + self._data[start : start + BLOCK].count(b"\n"))
            self._before = before
        rest = bytes(self._data[block * BLOCK : offset])
        return before[block] + rest.count(b"\n") + 1, offset - self._data.rfind(b"\n", 0, offset)
