"""Rows of a data file, at once and without loading it: JSON, JSONL, CSV, Parquet, plain text, also compressed.

`open_rows` decides the format and returns before anything is read through. Owns where the rows of each format lie in a
file and what each means; `engine.data.mapped` reads them from there. It refuses archives, pickles and scripts by name.
Standard library only; Parquet and saved data sets live in `engine.data.columnar`, imported when one is opened.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import mmap
import os
import re
import stat
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from engine.data.compressed import COMPRESSIONS, Unpacked, unpacked_head
from engine.data.image_folder import CaptionRows, MetadataRows, is_image_folder, metadata_of
from engine.data.mapped import FileRows, Rows
from engine.data.parsing import Row, decode, parse_object, sample
from engine.errors import DataError, visible

HEAD = 256 * 1024
REFUSED = {
    **dict.fromkeys((".zip", ".tar", ".tgz", ".7z", ".rar"), "an archive; unpack it first"),
    **dict.fromkeys((".pkl", ".pickle", ".pt", ".pth", ".bin", ".joblib"), "a pickle, which can run code"),
    **dict.fromkeys((".py", ".ipynb", ".sh"), "a script; data is never run"),
}
_BOM = b"\xef\xbb\xbf"
_STRUCTURE = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[{}\[\],]', re.DOTALL)


class LineRows(FileRows):
    """One JSON object a line. Blank lines are skipped."""

    kind = "jsonl"

    def _scan(self, data: mmap.mmap | bytes, start: int = 0) -> Iterator[tuple[int, int]]:
        position, stop = start or (3 if data[:3] == _BOM else 0), len(data)
        find = data.find
        while position < stop:
            end = find(b"\n", position)
            if end < 0:
                end = stop
            if end - position >= 8 or bytes(data[position:end]).strip():
                yield position, end
            position = end + 1

    def spans(self, start: int = 0) -> Iterator[tuple[int, int]]:
        return self._scan(self._map, start)

    def begins(self, byte: int) -> int:
        found = self._map.find(b"\n", byte - 1) if byte else -1
        return found + 1 if found >= 0 else self.size_in_bytes if byte else 0

    def _parse(self, raw: bytes, line: int, column: int) -> Row:
        return parse_object(raw, self.path, line, column)


class ArrayRows(FileRows):
    """A JSON file that is one list of objects, or one object over several lines; the borders are found without parsing."""

    kind = "json"

    def _scan(self, data: mmap.mmap | bytes) -> Iterator[tuple[int, int]]:
        depth, start = 0, -1
        position = 3 if data[:3] == _BOM else 0
        whole = -1
        """Where the outermost object begins, in a file that is no list."""
        after = -1
        """Where the comma stands after which a row must follow."""
        for match in _STRUCTURE.finditer(data):
            mark = match.group()[:1]
            if depth <= 1 and start < 0 and (gap := bytes(data[position : match.start()])).strip():
                # A bare word or number: it is no object, and reading it says so.
                start = position + len(gap) - len(gap.lstrip())
                self._after_row(depth, after, start)
            position = match.end()
            if mark == b'"':
                if depth == 1 and start < 0 and whole < 0:
                    start = match.start()
                    self._after_row(depth, after, start)
                continue
            if mark in b"{[":
                if depth == 0 and mark == b"{":
                    whole = match.start()
                elif depth == 1 and start < 0 and whole < 0:
                    start = match.start()
                    self._after_row(depth, after, start)
                depth += 1
            elif mark in b"}]":
                depth -= 1
                if depth == 1 and start >= 0 and whole < 0:
                    yield start, match.end()
                    start, after = -1, -2
                if depth <= 0:
                    if whole >= 0:
                        yield whole, match.end()
                    elif start >= 0:
                        yield start, match.start()
                    elif after >= 0:
                        self._fail(after, "a comma stands after the last row of the list; take it out")
                    break
            elif depth == 1 and whole < 0:
                if start >= 0:
                    yield start, match.start()
                elif after != -2:
                    self._fail(match.start(), "a row is missing before this comma")
                start, after = -1, match.start()
        if depth > 0:
            begin = whole if whole >= 0 else start if start >= 0 else position
            self._fail(begin, "the file ends in the middle of this row")
        if data[position:].strip():
            what = "object" if whole >= 0 else "list"
            self._fail(position, f"text follows after the end of the {what}")

    def _after_row(self, depth: int, after: int, start: int) -> None:
        """-2 is a row that no comma has followed yet."""
        if depth == 1 and after == -2:
            self._fail(start, "a comma is missing before this row")

    def _fail(self, offset: int, message: str) -> NoReturn:
        line, column = self._lines.place(offset)
        found = sample(bytes(self._map[offset : offset + 400]))
        raise DataError(f"{message}: {found}", path=visible(self.path), line=line, column=column)

    def _parse(self, raw: bytes, line: int, column: int) -> Row:
        return parse_object(raw, self.path, line, column)


class TableRows(FileRows):
    """CSV or TSV with the column names in the first line; a quoted field may span lines."""

    kind = "csv"

    def __init__(self, path: str, unpacked: Unpacked | None = None, head: bytes = b"", *, index: bool = True) -> None:
        line = decode(head.removeprefix(_BOM).split(b"\n", 1)[0], path, 1)
        self._delimiter = "\t" if Path(path).suffix == ".tsv" else max(",\t;|", key=line.count)
        names = self._fields([line.rstrip("\r")], path, 1)
        self._headless = any(re.fullmatch(r"-?\d+([.]\d+)?", name.strip()) for name in names)
        if self._headless:
            names = [f"column {number}" for number in range(1, len(names) + 1)]
            self.note = "the first line is data, so the columns are named column 1, column 2, ..."
        if len(set(names)) < len(names):
            raise DataError("two columns have one name", "Name each column once.", path=visible(path), line=1)
        self._names = names
        super().__init__(path, unpacked, index=index)

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
        fields = self._fields(io.StringIO(text.rstrip("\r"), newline=""), self.path, line)
        if len(fields) != len(self._names):
            message = f"{len(fields)} fields where the first line names {len(self._names)} columns: {sample(raw)}"
            raise DataError(message, path=visible(self.path), line=line)
        return dict(zip(self._names, fields, strict=True))

    def _fields(self, lines: Iterable[str], path: str, line: int) -> list[str]:
        """The fields of one row. Raises `DataError` for what csv does not take."""
        csv.field_size_limit(2**31 - 1)
        try:
            return next(csv.reader(lines, delimiter=self._delimiter), [])
        except csv.Error as problem:
            found = str(problem).partition(" - ")[0]
            message = f"no row of a table ({found}), as a carriage return outside of quotes makes it"
            todo = "End lines with line feeds, and put fields that hold line breaks into quotes."
            raise DataError(message, todo, path=visible(path), line=line) from None


class TextRows(FileRows):
    """Plain text: paragraphs separated by blank lines, or lines where the file's beginning has no blank line."""

    kind = "text"

    def __init__(self, path: str, unpacked: Unpacked | None = None, head: bytes = b"", *, index: bool = True) -> None:
        self._paragraphs = re.search(rb"\n[ \t\r]*\n\s*\S", head) is not None
        self.note = f"a row is a {'paragraph; blank lines separate them' if self._paragraphs else 'line'}"
        self._border = re.compile(rb"\r?\n(?:[ \t\r]*\n)+" if self._paragraphs else rb"\r?\n")
        super().__init__(path, unpacked, index=index)

    def spans(self, start: int = 0) -> Iterator[tuple[int, int]]:
        return self._scan(self._map, start)

    def begins(self, byte: int) -> int:
        if not byte:
            return 0
        found = self._border.search(self._map, byte - 1)
        return found.end() if found else self.size_in_bytes

    def _scan(self, data: mmap.mmap | bytes, start: int = 0) -> Iterator[tuple[int, int]]:
        start = start or (3 if data[:3] == _BOM else 0)
        for match in self._border.finditer(data, start):
            if bytes(data[start : match.start()]).strip():
                yield start, match.start()
            start = match.end()
        if bytes(data[start:]).strip():
            yield start, len(data)

    def _parse(self, raw: bytes, line: int, column: int) -> Row:
        return {"text": decode(raw, self.path, line, column).rstrip("\r\n")}


def open_rows(path: str | os.PathLike[str], *, index: bool = True) -> Rows:
    """The rows of a local file or of a data set saved on disk; without `index` those of a plain file are not looked for
    (`FileRows`). Raises `DataError` when it cannot be one."""
    source = Path(path)
    shown = visible(str(path))
    refuse_special(source)
    if source.is_dir():
        if (source / "state.json").exists() or (source / "dataset_dict.json").exists():
            return import_module("engine.data.columnar").SavedRows(str(source))
        if is_image_folder(source):
            metadata = metadata_of(source)
            return CaptionRows(source) if metadata is None else MetadataRows(source, open_rows(metadata, index=index))
        todo = "Several files are several sources; with data.streaming a folder of them is one."
        raise DataError("is a folder; name a file in it or a data set written by save_to_disk", todo, path=shown)
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
            return TableRows(str(source), unpacked, head, index=index)
        if kind == "text":
            return TextRows(str(source), unpacked, head, index=index)
        return (ArrayRows if kind == "json" else LineRows)(str(source), unpacked, index=index)
    except FileNotFoundError:
        raise DataError(
            "no such file", "Put it there, or give another path; those in a config begin at its folder.", path=shown
        ) from None
    except OSError as problem:
        raise DataError(f"cannot be read: {problem.strerror or problem}", path=shown) from None


def refuse_special(path: Path) -> None:
    """Raises `DataError` for a named pipe, a device or a socket: reading one may wait for ever or never end."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return
    known = {
        stat.S_IFIFO: "a named pipe",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFSOCK: "a socket",
    }
    if kind := known.get(stat.S_IFMT(mode)):
        raise DataError(f"is {kind}", "Write its rows to a file, and name that.", path=visible(str(path)))


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
        spread = line == b"{" or (suffix == ".json" and line[-1:] not in (b"}", b"]") and b"\n" in head.strip())
        return "json" if start == b"{" and spread else "jsonl"
    if suffix in (".txt", ".text", ".md"):
        return "text"
    with contextlib.suppress(ValueError):
        if start == b"{" and isinstance(json.loads(head.removeprefix(_BOM).lstrip().split(b"\n", 1)[0]), dict):
            return "jsonl"
    return "json" if start == b"[" else "text"


def _head(source: Path) -> bytes:
    with source.open("rb") as file:
        return file.read(HEAD)
