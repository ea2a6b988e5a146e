"""Rows of a data file, at once and without loading it: JSON, JSONL, CSV, Parquet, plain text, also compressed.

`open_rows` returns before anything is read through: the file is memory-mapped and a thread notes where each row
begins, so the first rows show at once and a row anywhere is one slice away. A row is parsed when it is asked for, and a
bad one is a `DataError` with file, line, column and the text found there. It refuses archives, pickles and scripts by
name. Standard library only; Parquet and saved data sets live in `engine.data.columnar`, imported when one is opened.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import mmap
import os
import re
import threading
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from engine.data.compressed import COMPRESSIONS, Unpacked, unpacked_head
from engine.data.lines import Lines
from engine.data.parsing import Row, decode, parse_object, sample
from engine.errors import DataError, visible

CLIP = 64 * 1024
HEAD = 256 * 1024
REFUSED = {
    **dict.fromkeys((".zip", ".tar", ".tgz", ".7z", ".rar"), "an archive; unpack it first"),
    **dict.fromkeys((".pkl", ".pickle", ".pt", ".pth", ".bin", ".joblib"), "a pickle, which can run code"),
    **dict.fromkeys((".py", ".ipynb", ".sh"), "a script; data is never run"),
}
_BOM = b"\xef\xbb\xbf"
_STRUCTURE = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[{}\[\],]', re.DOTALL)


class Rows(ABC):
    """Rows of one source by number. `length` is `None` until the index is complete."""

    path: str
    kind: str
    note: str = ""

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

    def error(self, index: int, message: str, hint: str = "") -> DataError:
        path, line = self.place(index)
        return DataError(message, hint, path=visible(path), line=line)

    def close(self) -> None:
        return


class FileRows(Rows):
    """A memory-mapped file whose rows are byte ranges found by a thread."""

    def __init__(self, path: str, unpacked: Unpacked | None = None) -> None:
        self.path = path
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
        self._thread.start()

    # -- what the formats say ------------------------------------------------------------------------------------------
    @abstractmethod
    def _scan(self, data: mmap.mmap | bytes) -> Iterator[tuple[int, int]]: ...

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

    def place(self, index: int) -> tuple[str, int | None]:
        start, _ = self._range(index)
        return self.path, self._lines.place(start)[0]

    def close(self) -> None:
        self._closed = True
        with self._changed:
            self._changed.notify_all()
        self._thread.join(timeout=2)
        if isinstance(self._map, mmap.mmap):
            self._map.close()

    def _range(self, index: int) -> tuple[int, int]:
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


class LineRows(FileRows):
    """One JSON object a line. Blank lines are skipped."""

    kind = "jsonl"

    def _scan(self, data: mmap.mmap | bytes) -> Iterator[tuple[int, int]]:
        position, stop = 3 if data[:3] == _BOM else 0, len(data)
        find = data.find
        while position < stop:
            end = find(b"\n", position)
            if end < 0:
                end = stop
            if end - position >= 8 or bytes(data[position:end]).strip():
                yield position, end
            position = end + 1

    def _parse(self, raw: bytes, line: int, column: int) -> Row:
        return parse_object(raw, self.path, line, column)


class ArrayRows(FileRows):
    """A JSON file that is one list of objects; the borders are found without parsing."""

    kind = "json"

    def _scan(self, data: mmap.mmap | bytes) -> Iterator[tuple[int, int]]:
        depth, start = 0, -1
        position = 0
        for match in _STRUCTURE.finditer(data):
            mark = match.group()[:1]
            position = match.end()
            if mark == b'"':
                if depth == 1 and start < 0:
                    start = match.start()
                continue
            if mark in b"{[":
                if depth == 0 and mark == b"{":
                    self._fail(match.start(), "must be a list of objects; the file holds one object")
                if depth == 1 and start < 0:
                    start = match.start()
                depth += 1
            elif mark in b"}]":
                depth -= 1
                if depth == 1 and start >= 0:
                    yield start, match.end()
                    start = -1
                if depth <= 0:
                    break
            elif depth == 1 and start >= 0:
                yield start, match.start()
                start = -1
        if depth > 0:
            self._fail(start if start >= 0 else position, "the file ends in the middle of this row")
        if data[position:].strip():
            self._fail(position, "text follows after the end of the list")

    def _fail(self, offset: int, message: str) -> NoReturn:
        line, column = self._lines.place(offset)
        found = sample(bytes(self._map[offset : offset + 400]))
        raise DataError(f"{message}: {found}", path=visible(self.path), line=line, column=column)

    def _parse(self, raw: bytes, line: int, column: int) -> Row:
        return parse_object(raw, self.path, line, column)


class TableRows(FileRows):
    """CSV or TSV with the column names in the first line; a quoted field may span lines."""

    kind = "csv"

    def __init__(self, path: str, unpacked: Unpacked | None = None, head: bytes = b"") -> None:
        line = decode(head.removeprefix(_BOM).split(b"\n", 1)[0], path, 1)
        self._delimiter = "\t" if Path(path).suffix == ".tsv" else max(",\t;|", key=line.count)
        names = next(csv.reader([line.rstrip("\r")], delimiter=self._delimiter), [])
        self._headless = any(re.fullmatch(r"-?\d+([.]\d+)?", name.strip()) for name in names)
        if self._headless:
            names = [f"column {number}" for number in range(1, len(names) + 1)]
            self.note = "the first line is data, so the columns are named column 1, column 2, ..."
        if len(set(names)) < len(names):
            raise DataError("two columns have one name", "Name each column once.", path=visible(path), line=1)
        self._names = names
        super().__init__(path, unpacked)

    def _scan(self, data: mmap.mmap | bytes) -> Iterator[tuple[int, int]]:
        start, stop, skip = 3 if data[:3] == _BOM else 0, len(data), not self._headless
        quoted = False
        for match in re.finditer(rb'["\n]', data):
            if match.group() == b'"':
                quoted = not quoted
                continue
            if quoted:
                continue
            if bytes(data[start : match.start()]).strip():
                if not skip:
                    yield start, match.start()
                skip = False
            start = match.end()
        if quoted:
            line, column = self._lines.place(start)
            raise DataError(
                f"a quote opened in this row is never closed: {sample(bytes(data[start : start + 400]))}",
                path=visible(self.path),
                line=line,
                column=column,
            )
        if bytes(data[start:stop]).strip() and not skip:
            yield start, stop

    def _parse(self, raw: bytes, line: int, column: int) -> Row:
        text = decode(raw, self.path, line)
        csv.field_size_limit(2**31 - 1)
        fields = next(csv.reader(io.StringIO(text.rstrip("\r"), newline=""), delimiter=self._delimiter), [])
        if len(fields) != len(self._names):
            message = f"{len(fields)} fields where the first line names {len(self._names)} columns: {sample(raw)}"
            raise DataError(message, path=visible(self.path), line=line)
        return dict(zip(self._names, fields, strict=True))


class TextRows(FileRows):
    """Plain text: paragraphs separated by blank lines, or lines where the file's beginning has no blank line."""

    kind = "text"

    def __init__(self, path: str, unpacked: Unpacked | None = None, head: bytes = b"") -> None:
        self._paragraphs = re.search(rb"\n[ \t\r]*\n\s*\S", head) is not None
        self.note = f"a row is a {'paragraph; blank lines separate them' if self._paragraphs else 'line'}"
        super().__init__(path, unpacked)

    def _scan(self, data: mmap.mmap | bytes) -> Iterator[tuple[int, int]]:
        border = re.compile(rb"\r?\n(?:[ \t\r]*\n)+" if self._paragraphs else rb"\r?\n")
        start = 3 if data[:3] == _BOM else 0
        for match in border.finditer(data, start):
            if bytes(data[start : match.start()]).strip():
                yield start, match.start()
            start = match.end()
        if bytes(data[start:]).strip():
            yield start, len(data)

    def _parse(self, raw: bytes, line: int, column: int) -> Row:
        return {"text": decode(raw, self.path, line, column).rstrip("\r\n")}


def open_rows(path: str | os.PathLike[str]) -> Rows:
    """The rows of a local file or of a data set saved on disk. Raises `DataError` when it cannot be one."""
    source = Path(path)
    shown = visible(str(path))
    if source.is_dir():
        if (source / "state.json").exists() or (source / "dataset_dict.json").exists():
            return import_module("engine.data.columnar").SavedRows(str(source))
        raise DataError("is a folder; name a file in it or a data set written by save_to_disk", path=shown)
    suffixes = [suffix.lower() for suffix in source.suffixes]
    for suffix in suffixes[-2:]:
        if suffix in REFUSED:
            raise DataError(f"is {REFUSED[suffix]}", "Use JSONL, JSON, CSV, Parquet or plain text.", path=shown)
    try:
        packed = suffixes[-1] if suffixes and suffixes[-1] in COMPRESSIONS else ""
        head = unpacked_head(source, packed, HEAD) if packed else _head(source)
        if not head.strip(b"\xef\xbb\xbf \t\r\n\x00"):
            raise DataError("the file is empty", "Check the path, or that it was written to the end.", path=shown)
        kind = _kind(suffixes[:-1] if packed else suffixes, head)
        if kind == "parquet":
            if packed:
                raise DataError("Parquet is compressed inside; unpack this file first", path=shown)
            return import_module("engine.data.columnar").ParquetRows(str(source))
        unpacked = Unpacked(source, packed) if packed else None
        if kind == "csv":
            return TableRows(str(source), unpacked, head)
        if kind == "text":
            return TextRows(str(source), unpacked, head)
        return (ArrayRows if kind == "json" else LineRows)(str(source), unpacked)
    except FileNotFoundError:
        raise DataError("no such file", "Paths in a config are relative to its folder.", path=shown) from None
    except OSError as problem:
        raise DataError(f"cannot be read: {problem.strerror or problem}", path=shown) from None


def _kind(suffixes: list[str], head: bytes) -> str:
    """The format by content where content decides (Parquet, a list, an object a line), else by name."""
    suffix = suffixes[-1] if suffixes else ""
    if head[:4] == b"PAR1" or suffix == ".parquet":
        return "parquet"
    if suffix in (".csv", ".tsv"):
        return "csv"
    start = head.removeprefix(_BOM).lstrip()[:1]
    if suffix in (".json", ".jsonl", ".ndjson"):
        if start == b"[":
            return "json"
        # An object that ends on its own line is one row of many; one that does not is a single pretty-printed object.
        line = head.removeprefix(_BOM).lstrip().split(b"\n", 1)[0].strip()
        return "json" if suffix == ".json" and start == b"{" and line == b"{" else "jsonl"
    if suffix in (".txt", ".text", ".md"):
        return "text"
    with contextlib.suppress(ValueError):
        if start == b"{" and isinstance(json.loads(head.removeprefix(_BOM).lstrip().split(b"\n", 1)[0]), dict):
            return "jsonl"
    return "json" if start == b"[" else "text"


def _head(source: Path) -> bytes:
    with source.open("rb") as file:
        return file.read(HEAD)
