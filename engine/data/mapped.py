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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from engine.data.compressed import Unpacked
from engine.data.parsing import Row
from engine.errors import DataError, visible

if TYPE_CHECKING:
    from engine.data.remote import Copy

BLOCK = 1 << 20
"""Bytes whose newlines are counted at once."""
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

    def drop(self) -> None:  # noqa: B027 - most keep nothing
        """Let go of what is in memory of a file that lies elsewhere; it is fetched again where rows of it are asked for."""

    def close(self) -> None:
        return


class CountedRows(Rows):
    """Rows whose number is known at once: `__len__` gives it."""

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    def length(self) -> int | None:
        return len(self)

    @property
    def progress(self) -> float:
        return 1.0

    def wait(self, timeout: float | None = None) -> int | None:
        return len(self)

    def first(self, count: int) -> list[Row]:
        return [self[index] for index in range(min(count, len(self)))]


class DerivedRows(Rows):
    """Rows each of which is made of one of others, `_at` of which number: where it lies and what it is called, that one says."""

    _rows: Rows

    def _at(self, index: int) -> int:
        return index

    def size(self, index: int) -> int:
        return self._rows.size(self._at(index))

    def place(self, index: int) -> tuple[str, int | None]:
        return self._rows.place(self._at(index))

    def named(self, index: int) -> str:
        return self._rows.named(self._at(index))

    def error(self, index: int, message: str, hint: str = "") -> DataError:
        return self._rows.error(self._at(index), message, hint)

    def close(self) -> None:
        self._rows.close()


class Lines:
    """The line and column, from 1, of a byte offset. Newlines are counted once a block, up to the furthest block that somebody
    asked about."""

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


class RowPlaces:
    """Where the rows of a file begin and end: noted by a thread once it is started, or those that `hold` is given.

    `spans` finds them; who asks for one that is not noted yet waits for it.
    """

    def __init__(self, path: str, spans: Callable[[], Iterator[tuple[int, int]]]) -> None:
        self.starts, self.ends = array("Q"), array("Q")
        self.complete = self.closed = False
        self.scanned = 0
        """Bytes of the file that were looked through."""
        self.held: dict[int, int] | None = {}
        self._failure: DataError | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._note, args=(path, spans), name="row-index", daemon=True)

    def start(self) -> None:
        self.held = None
        self._thread.start()

    def hold(self, spans: Iterable[tuple[int, int]]) -> list[int]:
        """From now on these rows, and no others, are known by the byte at which they begin."""
        self.held = dict(spans)
        return list(self.held)

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the last row. Raises what was wrong with the file."""
        # A complete index is read without the lock: a forked child must not wait for a thread that it does not have.
        if not self.complete:
            with self._changed:
                self._changed.wait_for(lambda: self.complete or self.closed, timeout)
        if self._failure is not None:
            raise self._failure

    def of(self, index: int) -> tuple[int, int]:
        """Where this row begins and ends. Raises IndexError where there is none."""
        if self.held is not None:
            if index not in self.held:
                raise IndexError(index)
            return index, self.held[index]
        if index < 0:
            self.wait()
            index += len(self.ends)
        if index >= len(self.ends):
            if not self.complete:
                with self._changed:
                    self._changed.wait_for(lambda: index < len(self.ends) or self.complete or self.closed)
            if index >= len(self.ends):
                if self._failure is not None:
                    raise self._failure
                raise IndexError(index)
        return self.starts[index], self.ends[index]

    def close(self) -> None:
        self.closed = True
        with self._changed:
            self._changed.notify_all()
        if self.held is None:
            self._thread.join(timeout=2)

    def _note(self, path: str, spans: Callable[[], Iterator[tuple[int, int]]]) -> None:
        try:
            for number, (start, end) in enumerate(spans()):
                self.starts.append(start)
                self.ends.append(end)
                if number < 256 or number % 4096 == 0:
                    self.scanned = end
                    with self._changed:
                        self._changed.notify_all()
                    if self.closed:
                        return
            if not self.starts:
                self._failure = DataError("the file holds no rows", "Check the path.", path=visible(path))
        except DataError as problem:
            self._failure = problem
        except (OSError, ValueError) as problem:
            if not self.closed:
                self._failure = DataError(f"cannot be read: {problem}", path=visible(path))
        finally:
            with self._changed:
                self.complete = True
                self._changed.notify_all()


class FileRows(Rows):
    """A memory-mapped file whose rows are byte ranges found by a thread; without `index` nobody looks for them, and a row
    is the one that begins at the byte that is asked for, once `hold` has said where it ends."""

    def __init__(self, path: str, unpacked: Unpacked | None = None, *, index: bool = True) -> None:
        self.path = path
        self._unpacked = unpacked
        self._places = RowPlaces(path, self._find)
        self._map: mmap.mmap | bytes = b""
        if unpacked is None:
            self._map = _mapped(Path(path).open("rb"))  # noqa: SIM115 - _mapped closes it
        self._lines = Lines(self._map)
        if index:
            self._places.start()

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
        return self._places.hold(spans)

    @property
    def size_in_bytes(self) -> int:
        """The size of the file."""
        return len(self._map)

    def newlines(self, stop: int) -> int:
        """Lines up to byte `stop`, the last one without a break too."""
        blocks = (self._map[start : min(start + BLOCK, stop)] for start in range(0, stop, BLOCK))
        return sum(block.count(b"\n") for block in blocks) + (stop > 0 and self._map[stop - 1 : stop] != b"\n")

    @abstractmethod
    def _parse(self, raw: bytes, line: int, column: int) -> Row: ...

    # -- reading -------------------------------------------------------------------------------------------------------
    @property
    def length(self) -> int | None:
        return len(self._places.ends) if self._places.complete else None

    @property
    def progress(self) -> float:
        if self._places.complete:
            return 1.0
        scanned = self._places.scanned / max(len(self._map), 1)
        return scanned if self._unpacked is None else self._unpacked.progress / 2 + scanned / 2

    def known(self) -> int:
        return len(self._places.ends)

    def wait(self, timeout: float | None = None) -> int | None:
        self._places.wait(timeout)
        return self.length

    def __getitem__(self, index: int) -> Row:
        start, end = self._places.of(index)
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
        start, end = self._places.of(index)
        return end - start

    def text(self, index: int, limit: int = CLIP) -> str:
        start, end = self._places.of(index)
        return bytes(self._map[start : min(end, start + limit)]).decode("utf-8", "replace")

    def named(self, index: int) -> str:
        return f"row {index}" if self._places.held is None else "the row"

    def place(self, index: int) -> tuple[str, int | None]:
        start, _ = self._places.of(index)
        return self.path, self._lines.place(start)[0]

    def close(self) -> None:
        self._places.close()
        if isinstance(self._map, mmap.mmap):
            self._map.close()

    def _find(self) -> Iterator[tuple[int, int]]:
        if self._unpacked is not None:
            self._map = _mapped(self._unpacked.wait(lambda: self._places.closed))
            self._lines = Lines(self._map)
        yield from self._scan(self._map)


def _mapped(file: io.BufferedReader) -> mmap.mmap | bytes:
    with file:
        size = os.fstat(file.fileno()).st_size
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
