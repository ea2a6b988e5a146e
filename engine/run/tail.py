"""Reading a file that another process appends to: complete lines only, from a byte offset, in bounded memory.

It tolerates a torn last line (waits for the rest), garbage, blocks of NULs, lines far too long and files that are cut
or replaced while they are read. Bad lines are counted and passed over. What events mean is not known here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from engine.errors import WorkbenchError
from engine.run import inside
from engine.run.events import MAX_LINE

# One read; also the longest line that is taken. Well above what our writer allows, so that a later one may write more.
_CHUNK = 16 * MAX_LINE
_scan: Callable[[str, int], tuple[Any, int]] = vars(json.JSONDecoder())["scan_once"]  # typeshed does not name it


class Tail:
    """`read` gives the events since the last call. `offset` is the end of the last line that was taken. The file lies in a
    run's folder; one that is not the run's own plain file is as one that is not there."""

    def __init__(self, path: str | os.PathLike[str], offset: int = 0) -> None:
        self.path = os.path.abspath(path)
        self._run = os.path.dirname(self.path)
        self.offset = offset
        self.bad_lines = 0
        self.restarts = 0
        self._inode = -1
        self._skipped = 0

    def size(self) -> int:
        """The file's length now; 0 while it does not exist. Notices a file that was cut or replaced."""
        try:
            stat = inside.lstat(self._run, self.path)
        except (OSError, WorkbenchError):
            return 0
        if (self._inode not in (-1, stat.st_ino)) or stat.st_size < self.offset:
            self.offset, self._skipped = 0, 0
            self.restarts += 1
        self._inode = stat.st_ino
        return stat.st_size

    def behind(self) -> int:
        """Bytes that were not read yet."""
        return max(0, self.size() - self.offset)

    def read(self, limit: int = 1000) -> list[dict[str, Any]]:
        """Up to `limit` events from complete lines; an empty list means that nothing whole is there."""
        events: list[dict[str, Any]] = []
        if self.behind() == 0:
            return events
        try:
            file = open(inside.open_file(self._run, self.path), "rb")  # noqa: SIM115 (closed below, opening may fail)
        except (OSError, WorkbenchError):
            return events
        with file:
            while len(events) < limit:
                file.seek(self.offset + self._skipped)
                block = file.read(_CHUNK)
                end = block.rfind(b"\n") + 1
                if end == 0:
                    if len(block) < _CHUNK:
                        break  # a torn tail: wait for the rest
                    self._skipped += len(block)
                    continue
                self._take_lines(block[:end], events, limit)
        return events

    def _take_lines(self, block: bytes, events: list[dict[str, Any]], limit: int) -> None:
        start = 0
        while start < len(block) and len(events) < limit:
            end = block.index(b"\n", start) + 1
            if self._skipped:
                # The rest of a line that was too long to be taken.
                self.bad_lines += 1
                self.offset += self._skipped
                self._skipped = 0
            else:
                event = parse(block[start:end])
                if event is not None:
                    events.append(event)
                elif block[start:end].strip():
                    self.bad_lines += 1
            self.offset += end - start
            start = end


def parse(line: bytes) -> dict[str, Any] | None:
    """The event of one line; nothing for a line that is none. NULs before it (a crashed disk) are passed over."""
    try:
        text = line.decode() if line.startswith(b"{") else line.decode().lstrip("\0\t\r ")
        # What `json.loads` does, without its detection of encodings and options: a third of the time of a line.
        event, end = _scan(text, 0)
    except (ValueError, StopIteration, RecursionError):
        return None
    if type(event) is dict and type(event.get("kind")) is str and (end + 1 == len(text) or not text[end:].strip()):
        return event
    return None
