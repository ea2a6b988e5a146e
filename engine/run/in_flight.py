"""The rows that the worker is on: kept in a mapped file, so that they are known even of a worker that was killed.

A step's rows are noted while its batches come and before they are trained on, without a call to the system; the batch of
a finished step stands in `batches.bin` (`engine.run.batches`).
"""

from __future__ import annotations

import mmap
import os
from array import array
from collections.abc import Sequence

from engine.errors import WorkbenchError
from engine.run import inside
from engine.run.store import RunFolder

MOST = 4096
"""Rows of one step that are noted."""
_BYTES = 8 * (2 + MOST)


class InFlight:
    """Writes the file: int64 of the step, of how many rows it has so far, and of their numbers."""

    def __init__(self, run: RunFolder) -> None:
        self._words: memoryview[int] | None = None
        handle = inside.open_file(run, run.in_flight, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            os.posix_fallocate(handle, 0, _BYTES)  # a hole that the disk cannot fill later would kill the worker
            self._words = memoryview(mmap.mmap(handle, _BYTES)).cast("q")
        except OSError:
            pass  # no room, or no way to map it here: a run goes on without
        finally:
            os.close(handle)

    def note(self, step: int, rows: Sequence[int]) -> None:
        """These are the rows of this step so far."""
        if self._words is None:
            return
        rows = rows[:MOST]
        self._words[1] = 0
        self._words[2 : 2 + len(rows)] = memoryview(array("q", rows))
        self._words[0] = step
        self._words[1] = len(rows)


def in_flight(run: RunFolder) -> tuple[int, list[int]] | None:
    """The step that the run was on when it was last heard of, and its rows; None where nothing is known."""
    try:
        words = array("q", inside.read(run, run.in_flight, _BYTES)[: _BYTES // 8 * 8])
    except (OSError, ValueError, WorkbenchError):
        return None
    if len(words) < 2 or words[0] < 1 or not 0 < words[1] <= min(MOST, len(words) - 2):
        return None
    return words[0], words[2 : 2 + words[1]].tolist()
