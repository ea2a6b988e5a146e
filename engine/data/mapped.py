"""Rows of a source by number, and those of a memory-mapped file whose borders a thread notes.

The first rows show at once and a row anywhere is one slice away. A row is parsed when it is asked for, and a bad one is
a `DataError` with file, line, column and the text found there. What a row is, each format says (`engine.data.rows`).
"""

from __future__ import annotations

import io
import json
import mmap
import os
import threading
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from engine.data.compressed import Unpacked
from engine.data.lines import Lines
from engine.data.parsing import Row
from engine.errors import DataError, visible

if TYPE_CHECKING:
    from engine.data.remote import Copy

_BLOCK = 8 << 20
CLIP = 64 * 1024
"""Bytes of a row's text that are shown."""


class Rows(ABC):
    """Rows of one source by number. `length` is `None` until the index is complete."""

    path: str
    kind: str
    note: str = ""
    copy: Copy | None = None
    """What is read in place of a source that lies elsewhere; `path` is that source's address."""

    @property
    @abstractmethod
    def length(self) -> int | None: ...

    @property
    @abstractmethod
    def progress(self) -> float:
        """Share of the source that is indexed, 0 to 1."""

    @abstractmethod
    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the index; the number of rows, or nothing when the time is up."""

    @abstractmethod
    def __getitem__(self, index: int) -> Row: ...

    @abstractmethod
    def first(self, count: int) -> list[Row]: ...

    def __len__(self) -> int:
        length = self.wait()
        return 0 if length is None else length

    def __iter__(self) -> Iterator[Row]:
        for index in range(len(self)):
            yield self[index]

    def known(self) -> int:
        """Rows that can be read now without waiting."""
        return self.length or 0

    def size(self, index: int) -> int:
        """Bytes of the row, 0 where the format does not say."""
        return 0

    def text(self, index: int, limit: int = CLIP) -> str:
        """The row as it stands in the source, clipped: for looking, never for training."""
        return json.dumps(self[index], ensure_ascii=False, default=str)[:limit]

    def place(self, index: int) -> tuple[str, int | None]:
        """Path and line (from 1) of a row, for messages."""
        return self.path, None

    def named(self, index: int) -> str:
        """What a message calls a row, beside its file and line."""
        return f"row {index}"

    def error(self, index: int, message: str, hint: str = "") -> DataError:
        path, line = self.place(index)
        return DataError(message, hint, path=visible(path), line=line)

    def close(self) -> None:
        return


class FileRows(Rows):
    """A memory-mapped file whose rows are byte ranges found by a thread; without `index` nobody looks for them, and a row
    is the one that begins at the byte that is asked for, once `hold` has said where it ends."""

    def __init__(self, path: str, unpacked: Unpacked | None = None, *, index: bool = True) -> None:
        self.path = path
        self._held: dict[int, int] | None = None if index else {}
        self._unpacked = unpacked
        self._starts, self._ends = array("Q"), array("Q")
        self._complete, self._closed = False, False
        self._failure: DataError | None = None
        self._scanned, self._bytes = 0, 1
        self._changed = threading.Condition()
        self._map: mmap.mmap | bytes = b""
        self._lines = Lines(self._map)
        if unpacked is None:
            self._open_map(Path(path).open("rb"))  # noqa: SIM115 - _open_map closes it
        self._thread = threading.Thread(target=self._run, name="row-index", daemon=True)
        if index:
            self._thread.start()

    # -- what the formats say ------------------------------------------------------------------------------------------
    @abstractmethod
    def _scan(self, data: mmap.mmap | bytes) -> Iterator[tuple[int, int]]: ...

    def spans(self, start: int = 0) -> Iterator[tuple[int, int]]:
        """Where rows begin and end, in order, from the row on that begins at byte `start`; 0 is the file's beginning."""
        if start:
            raise ValueError(f"{self.kind}: rows are found from the beginning of the file alone")
        return self._scan(self._map)

    def begins(self, byte: int) -> int:
        """The first place from `byte` on that is known to be a row's beginning, where that can be told from there."""
        raise ValueError(f"{self.kind}: rows are found from the beginning of the file alone")

    def hold(self, spans: Iterable[tuple[int, int]]) -> list[int]:
        """From now on these rows, and no others, are read by the byte at which they begin."""
        self._held = dict(spans)
        return list(self._held)

    @property
    def size_in_bytes(self) -> int:
        """The size of the file."""
        return len(self._map)

    def newlines(self, stop: int) -> int:
        """Lines up to byte `stop`, the last one without a break too."""
        blocks = (self._map[start : min(start + _BLOCK, stop)] for start in range(0, stop, _BLOCK))
        return sum(block.count(b"\n") for block in blocks) + (stop > 0 and self._map[stop - 1 : stop] != b"\n")

    @abstractmethod
    def _parse(self, raw: bytes, line: int, column: int) -> Row: ...

    # -- reading -------------------------------------------------------------------------------------------------------
    @property
    def length(self) -> int | None:
        return len(self._starts) if self._complete else None

    @property
    def progress(self) -> float:
        if self._complete:
            return 1.0
        unpacking = self._unpacked.progress if self._unpacked else 1.0
        scanned = self._scanned / self._bytes
        return scanned if self._unpacked is None else unpacking / 2 + scanned / 2

    def known(self) -> int:
        return len(self._ends)

    def wait(self, timeout: float | None = None) -> int | None:
        # A complete index is read without the lock: a forked child must not wait for a thread that it does not have.
        if not self._complete:
            with self._changed:
                self._changed.wait_for(lambda: self._complete or self._closed, timeout)
        if self._failure is not None:
            raise self._failure
        return self.length

    def __getitem__(self, index: int) -> Row:
        start, end = self._range(index)
        raw = bytes(self._map[start:end])
        try:
            return self._parse(raw, 1, 1)
        except DataError:
            # Lines are counted only for a row that is bad: the first count costs a pass over all before it.
            return self._parse(raw, *self._lines.place(start))

    def first(self, count: int) -> list[Row]:
        rows = []
        for index in range(count):
            try:
                rows.append(self[index])
            except IndexError:
                break
        return rows

    def size(self, index: int) -> int:
        start, end = self._range(index)
        return end - start

    def text(self, index: int, limit: int = CLIP) -> str:
        start, end = self._range(index)
        return bytes(self._map[start : min(end, start + limit)]).decode("utf-8", "replace")

    def named(self, index: int) -> str:
        return f"row {index}" if self._held is None else "the row"

    def place(self, index: int) -> tuple[str, int | None]:
        start, _ = self._range(index)
        return self.path, self._lines.place(start)[0]

    def close(self) -> None:
        self._closed = True
        with self._changed:
            self._changed.notify_all()
        if self._held is None:
            self._thread.join(timeout=2)
        if isinstance(self._map, mmap.mmap):
            self._map.close()

    def _range(self, index: int) -> tuple[int, int]:
        if self._held is not None:
            if index not in self._held:
                raise IndexError(index)
            return index, self._held[index]
        if index < 0:
            index += len(self)
        if index >= len(self._ends):
            if not self._complete:
                with self._changed:
                    self._changed.wait_for(lambda: index < len(self._ends) or self._complete or self._closed)
            if index >= len(self._ends):
                if self._failure is not None:
                    raise self._failure
                raise IndexError(index)
        return self._starts[index], self._ends[index]

    # -- indexing ------------------------------------------------------------------------------------------------------
    def _open_map(self, file: io.BufferedReader) -> None:
        with file:
            self._bytes = max(os.fstat(file.fileno()).st_size, 1)
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if os.fstat(file.fileno()).st_size else b""
            self._lines = Lines(self._map)

    def _run(self) -> None:
        try:
            if self._unpacked is not None:
                self._open_map(self._unpacked.wait(lambda: self._closed))
            for number, (start, end) in enumerate(self._scan(self._map)):
                self._starts.append(start)
                self._ends.append(end)
                if number < 256 or number % 4096 == 0:
                    self._scanned = end
                    with self._changed:
                        self._changed.notify_all()
                    if self._closed:
                        return
            if not self._starts and self._failure is None:
                self._failure = DataError("the file holds no rows", "Check the path.", path=visible(self.path))
        except DataError as problem:
            self._failure = problem
        except (OSError, ValueError) as problem:
            if not self._closed:
                self._failure = DataError(f"cannot be read: {problem}", path=visible(self.path))
        finally:
            with self._changed:
                self._complete = True
                self._changed.notify_all()
