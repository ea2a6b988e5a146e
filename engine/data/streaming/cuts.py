"""Sources of a stream cut into shards that can be read one by one, without looking at the rest.

Lines and paragraphs of a plain file are cut by bytes, Parquet and Arrow by rows: any of their shards is read at once, also of
a file on the hub. What
has no row borders that can be told from within (compressed files, CSV, a JSON list) is read from its beginning, in order.
A row is named by its place: the byte where it begins, or its number.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from engine.config.files import COMPRESSIONS, scheme_of
from engine.data.compressed import CHUNK, read_unpacked, unpacking
from engine.data.hub_sets import BLOCK, TEXTS, HubFile, HubLines, RangeFile, is_hub_set, kind_of
from engine.data.mapped import FileRows, Rows
from engine.data.parsing import Row, decode, parse_object
from engine.data.rows import open_rows, refuse_special
from engine.data.streaming.folders import paths_of
from engine.errors import DataError, visible

BYTES = 256 << 10
"""Bytes of a plain file that become a shard."""
ROWS = 512
"""Rows of any other source that do."""
PLACE = 1 << 62
FILE = 1 << 48
"""A row's number is PLACE + FILE * file + place where rows are not counted through."""


class Cut:
    """One file or data set in shards."""

    count: int | None
    """How many shards there are; None where only reading to the end tells."""
    units: Sequence[int] | None = None
    """Shards that are read together at little more than the price of one, as sizes of consecutive groups; None where each
    stands for itself."""

    known_rows: int | None = None
    """How many rows there are, where that is known at once."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def places(self, shard: int) -> tuple[list[int], bool]:
        """The places of a shard's rows, by which `rows` then gives them, and whether no shard comes after it."""
        raise NotImplementedError

    def some_places(self, shards: Sequence[int]) -> list[int]:
        """The places of the rows of several shards, all of which `rows` then gives."""
        return self.places(shards[0])[0]

    def length(self) -> int | None:
        """How many rows there are, which may take a pass over the file; None where only reading them tells."""
        return None


class ByBytes(Cut):
    """A plain file of lines or paragraphs."""

    rows: FileRows

    def __init__(self, rows: FileRows, limit: int | None) -> None:
        super().__init__(rows)
        self._stop = rows.size_in_bytes if limit is None else self._after(limit)
        self.count = max(1, -(-self._stop // BYTES))

    def _after(self, limit: int) -> int:
        """The byte behind so many rows."""
        return max((after for _, after in itertools.islice(self.rows.spans(), limit)), default=0)

    def places(self, shard: int) -> tuple[list[int], bool]:
        return self.rows.hold(self._spans(shard)), shard + 1 >= (self.count or 0)

    def some_places(self, shards: Sequence[int]) -> list[int]:
        return self.rows.hold(span for shard in shards for span in self._spans(shard))

    def _borders(self, shard: int) -> tuple[int, int]:
        """The bytes where its first row begins and where that of the next shard does."""
        start, stop = (min(self.rows.begins(each * BYTES), self._stop) for each in (shard, shard + 1))
        return start, stop

    def _spans(self, shard: int) -> Iterator[tuple[int, int]]:
        start, stop = self._borders(shard)
        return itertools.takewhile(lambda span: span[0] < stop, self.rows.spans(start) if start < stop else ())

    def length(self) -> int | None:
        """A line that is blank counts, since counting the line breaks alone is a hundred times quicker."""
        if self.rows.kind == "jsonl":
            return self.rows.newlines(self._stop)
        return sum(1 for _ in itertools.takewhile(lambda span: span[0] < self._stop, self.rows.spans()))


class ByRows(Cut):
    """Rows whose number is known at once: Parquet, Arrow, generated ones."""

    def __init__(self, rows: Rows, limit: int | None, *, far: bool = False) -> None:
        super().__init__(rows)
        self.known_rows = length = len(rows) if limit is None else min(limit, len(rows))
        borders = [0, *(border for border in getattr(rows, "borders", ()) if border < length), length]
        groups = [range(first, after, ROWS) for first, after in itertools.pairwise(borders)]
        self._starts = [(start, min(start + ROWS, group.stop)) for group in groups for start in group]
        self.count = len(self._starts)
        # Of a file elsewhere the one group that it may have is fetched for its shards too; here it is mapped, and the order of
        # runs that have begun stays.
        self.units = [len(group) for group in groups] if far or len(groups) > 1 else None

    def places(self, shard: int) -> tuple[list[int], bool]:
        if not self._starts:
            return [], True  # one of so many files that nobody has asked whether it holds rows
        return list(range(*self._starts[shard])), shard + 1 >= len(self._starts)

    def some_places(self, shards: Sequence[int]) -> list[int]:
        return [place for shard in shards for place in self.places(shard)[0]]

    def length(self) -> int | None:
        return self.known_rows


class ByRanges(ByBytes):
    """A file of lines on the hub: shards that lie in one block of it are read together, and nothing tells how many rows it
    has."""

    def __init__(self, rows: HubLines, limit: int | None) -> None:
        super().__init__(rows, limit)
        count, together = self.count or 0, max(1, BLOCK // BYTES)
        self.units = [min(together, count - start) for start in range(0, count, together)]

    def _spans(self, shard: int) -> Iterator[tuple[int, int]]:
        start, stop = self._borders(shard)
        for span in self.rows.spans(start) if start < stop else ():
            if span[0] >= stop:
                return
            yield span
            if span[1] + 1 >= stop:
                return  # looking for the row behind it would fetch the block that it lies in

    def length(self) -> int | None:
        return None


class InOrder(Cut):
    """What is read from its beginning: going back, and going on after a resume, reads all before it again."""

    count = None

    rows: Sequential

    def __init__(self, rows: Sequential, limit: int | None) -> None:
        super().__init__(rows)
        self._limit = limit
        self._next = 0
        self._ahead: Any = None

    def places(self, shard: int) -> tuple[list[int], bool]:
        if shard < self._next or self._ahead is None:
            self._next, self._ahead = 0, _Ahead(itertools.islice(self.rows.begin(), self._limit))
        found: list[Any] = []
        while self._next <= shard:
            found = self._ahead.take(ROWS)
            self._next += 1
        return self.rows.keep(found), self._ahead.over


class _Ahead:
    """An iterator that knows whether anything comes after what was taken."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items
        self._waiting = list(itertools.islice(items, 1))

    @property
    def over(self) -> bool:
        return not self._waiting

    def take(self, count: int) -> list[Any]:
        found = [*self._waiting, *itertools.islice(self._items, count)] if self._waiting else []
        self._waiting = found[count:]
        return found[:count]


class Sequential(Rows):
    """Rows that are found from the beginning of a file alone; how many there are is not known before its end."""

    @property
    def length(self) -> int | None:
        return None

    @property
    def progress(self) -> float:
        return 0.0

    def wait(self, timeout: float | None = None) -> int | None:
        return None

    def begin(self) -> Iterator[Any]:
        """What tells each row's place, and what of it is there already, from the first."""
        raise NotImplementedError

    def keep(self, found: list[Any]) -> list[int]:
        """Have these rows of `begin` ready, by their places."""
        raise NotImplementedError

    def first(self, count: int) -> list[Row]:
        return [self[place] for place in self.keep(list(itertools.islice(self.begin(), count)))]


class Scanned(Sequential):
    """A plain file whose rows are found by a scan from its beginning: CSV, a list of JSON objects."""

    def __init__(self, rows: FileRows) -> None:
        self.path, self.kind, self.note, self._rows = rows.path, rows.kind, rows.note, rows

    def begin(self) -> Iterator[tuple[int, int]]:
        """Where its rows lie, from the first."""
        return self._rows.spans()

    def keep(self, found: list[tuple[int, int]]) -> list[int]:
        """Have these rows ready, by the byte where each begins."""
        return self._rows.hold(found)

    def __getitem__(self, index: int) -> Row:
        return self._rows[index]

    def place(self, index: int) -> tuple[str, int | None]:
        return self._rows.place(index)


class PackedLines(Sequential):
    """A compressed file with a row a line, unpacked as it is read and never kept; a row's place is its number."""

    kind = "jsonl"

    def __init__(self, path: str, suffix: str, *, text: bool, far: HubFile | None = None) -> None:
        self.path, self._file, self._suffix, self._text, self._far = path, Path(path), suffix, text, far
        self._held: dict[int, tuple[int, bytes]] = {}

    def begin(self) -> Iterator[tuple[int, int, bytes]]:
        """Number, line and bytes of each row. Raises `DataError` where the stream is broken."""
        number, line, rest = 0, 0, b""
        try:
            packed = self._file.open("rb") if self._far is None else io.BufferedReader(RangeFile(self._far), CHUNK)
        except OSError as problem:
            raise DataError(f"cannot be read: {problem.strerror or problem}", path=visible(self.path)) from None
        with packed, unpacking(packed, self._suffix) as stream:
            while True:
                chunk = read_unpacked(stream, CHUNK, self._file)
                *lines, rest = (rest + chunk).split(b"\n") if chunk else [rest, b""]
                for raw in lines:
                    line += 1
                    raw = raw.removeprefix(b"\xef\xbb\xbf") if line == 1 else raw
                    if raw.strip():
                        yield number, line, raw
                        number += 1
                if not chunk:
                    return

    def keep(self, found: list[tuple[int, int, bytes]]) -> list[int]:
        """Have these rows ready, by their numbers."""
        self._held = {number: (line, raw) for number, line, raw in found}
        return list(self._held)

    def __getitem__(self, index: int) -> Row:
        if index not in self._held:
            raise IndexError(index)
        line, raw = self._held[index]
        if self._text:
            return {"text": decode(raw, self.path, line).rstrip("\r")}
        return parse_object(raw, self.path, line)

    def place(self, index: int) -> tuple[str, int | None]:
        return self.path, self._held[index][0]


def cut_file(path: str, limit: int | None = None) -> Cut:
    """A local file as a stream reads it. Raises `DataError` for one that cannot be one."""
    file = Path(path)
    refuse_special(file)
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS and file.is_file():
        inner = suffixes[-2] if len(suffixes) > 1 else ""
        if inner not in (".jsonl", ".ndjson", ".json", ".txt", ".text"):
            raise DataError(
                "is compressed, and only lines of JSON or of text can be streamed from such a file",
                "Unpack it, or set data.streaming to false.",
                path=visible(path),
            )
        return InOrder(PackedLines(path, suffixes[-1], text=inner in (".txt", ".text")), limit)
    return cut_rows(open_rows(path, index=False), limit)


def cut_far(far: HubFile, limit: int | None = None) -> Cut:
    """A file on the hub that can be `read_by_parts`, as a stream reads it. Raises `DataError` for one that holds something
    else."""
    last, inner = kind_of(far.url)
    if last == ".parquet":
        from engine.data.columnar import ParquetRows

        return ByRows(ParquetRows(far.url, RangeFile(far)), limit, far=True)
    if last in COMPRESSIONS:
        return InOrder(PackedLines(far.url, last, text=inner in TEXTS, far=far), limit)
    return ByRanges(HubLines(far), limit)


def cut_rows(rows: Rows, limit: int | None = None) -> Cut:
    """Rows that are open already."""
    if not isinstance(rows, FileRows):
        return ByRows(rows, limit)
    try:
        rows.begins(0)
    except ValueError:
        return InOrder(Scanned(rows), limit)
    return ByBytes(rows, limit)


def row_at(sources: Sequence[str], number: int) -> Row | None:
    """The row of this number in a stream of these sources; None where it cannot be read at its place alone.

    Raises `DataError` for a source or a row that cannot be read.
    """
    if any(scheme_of(source) or is_hub_set(source) for source in sources):
        return None
    files = [path for source in sources for path in paths_of(source)]
    file, place = divmod(number - PLACE, FILE)
    if not 0 <= file < len(files):
        return None
    rows = cut_file(files[file]).rows
    try:
        if not isinstance(rows, FileRows) or place >= rows.size_in_bytes:
            return None
        rows.hold(itertools.islice(rows.spans(place), 1))
        return rows[place]
    finally:
        rows.close()
