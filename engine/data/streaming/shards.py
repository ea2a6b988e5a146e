"""Prepared shards of a stream on disk: an Arrow file and a note each, and the making of one.

A shard holds the prepared rows of one shard of one file in the file's order: it hangs on neither seed nor epoch, so that
epochs, runs and resumes share it. The note is written last and makes it complete.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from array import array
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from engine.data.arrow_file import ArrowFile
from engine.data.cache import Store
from engine.data.cache_entries import Held
from engine.data.packing import best_fit, joined
from engine.data.plan import Plan
from engine.data.prepared_rows import Row, shape_of
from engine.data.row_counts import Counts, too_long_error
from engine.data.streaming.files import Files
from engine.data.token_rows import token_rows
from engine.data.tokens import Tokens

Key = tuple[int, int]
"""File and shard."""


class Note(NamedTuple):
    """What is known of a shard beside its rows."""

    rows: int
    last: bool
    """Whether its file has no shard after it."""
    bytes: int
    counts: dict[str, Any]


class ShardFolder:
    """The shards of one stream in the store of prepared data."""

    def __init__(self, store: Store, key: str, about: dict[str, Any]) -> None:
        self.store, self.path = store, store.path(key)
        with self.writing(), store.lock(key, lambda what, done, total: None):
            self.path.mkdir(exist_ok=True)
            if not (self.path / "meta.json").is_file():
                self._put(self.path / "meta.json", json.dumps({"stream": about}))
            self.held = Held(self.path)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Raises WorkbenchError where the disk does not take what is written inside."""
        try:
            yield
        except OSError as problem:
            raise self.store.error(problem) from None

    def note(self, key: Key) -> Note | None:
        """What is known of a shard; None where it is not there."""
        try:
            found = json.loads(self._file(key, "json").read_text("utf-8"))
            return Note(found["rows"], found["last"], found["bytes"], found["counts"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def has(self, key: Key) -> bool:
        """Whether a shard is there."""
        return self._file(key, "json").is_file()

    def rows(self, key: Key) -> list[Row] | None:
        """The shard's rows; None where it is not there or damaged."""
        import pyarrow

        note = self.note(key)
        if note is None or not note.rows:
            return None if note is None else []
        try:
            with pyarrow.memory_map(str(self._file(key, "arrow"))) as mapped:
                rows = pyarrow.ipc.open_stream(mapped).read_all().to_pylist()
        except (OSError, pyarrow.ArrowException):
            rows = []
        if len(rows) != note.rows:
            self.remove(key)
            return None
        return rows

    def write(self, key: Key, rows: list[Row], types: dict[str, str], last: bool, counts: Counts) -> Note:
        """Put a shard in its place."""
        with self.writing():
            self.path.mkdir(exist_ok=True)
            size = 0
            if rows:
                made = self.path / f".{os.getpid()}.arrow.tmp"
                with ArrowFile(made, types) as file:
                    for row in rows:
                        file.add(row)
                size = made.stat().st_size
                os.replace(made, self._file(key, "arrow"))
            note = Note(len(rows), last, size, asdict(counts))
            self._put(self._file(key, "json"), json.dumps(note._asdict()))
        return note

    def remove(self, key: Key) -> None:
        """Take a shard away; whoever reads it at the moment is not disturbed."""
        for kind in ("json", "arrow"):
            self._file(key, kind).unlink(missing_ok=True)

    def all(self) -> dict[Key, int]:
        """The bytes of every shard that is there, the oldest first."""
        found: list[tuple[float, Key, int]] = []
        with contextlib.suppress(FileNotFoundError), os.scandir(self.path) as entries:
            for entry in entries:
                name, _, kind = entry.name.partition(".")
                if kind == "arrow" and name.replace("-", "").isdigit():
                    file, shard = map(int, name.split("-"))
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat()
                        found.append((status.st_mtime, (file, shard), status.st_size))
        return {key: size for _, key, size in sorted(found)}

    def _file(self, key: Key, kind: str) -> Path:
        return self.path / f"{key[0]}-{key[1]}.{kind}"

    def _put(self, place: Path, text: str) -> None:
        with tempfile.NamedTemporaryFile("w", dir=self.path, suffix=".tmp", delete=False, encoding="utf-8") as file:
            file.write(text)
        os.replace(file.name, place)


class ShardMaker:
    """Reads, tokenizes and keeps shards, in the process that prepares a stream."""

    def __init__(self, plan: Plan, files: Files, processing_class: Any, folder: ShardFolder) -> None:
        self.plan, self.files, self.folder = plan, files, folder
        self.tokens = Tokens(plan, processing_class)

    def make(self, key: Key) -> Note:
        """Prepare a shard. Raises WorkbenchError that names the file and the row for what training would refuse."""
        number, shard = key
        source = self.plan.sources[number]
        source.refuse_changed()
        cut = self.files.cut(number)
        source.rows = cut.rows
        places, last = cut.places(shard)
        counts = Counts()
        rows = list(self._rows([(number, place) for place in places], counts))
        source.refuse_changed()
        counts.notes = sorted(self.tokens.notes)
        if self.plan.packing and rows:
            rows = self._packs(rows, counts)
        return self.folder.write(key, rows, dict(shape_of(self.plan.method).types), last, counts)

    def _rows(self, order: list[tuple[int, int]], counts: Counts) -> Iterator[Row]:
        columns = (*shape_of(self.plan.method).columns, "row", "images")
        for row in token_rows(self.plan, self.tokens, order, counts):
            if row.get("rejected_for"):
                raise too_long_error(self.plan, row["row"], f"{row['length']:,} tokens")
            yield {name: row[name] for name in columns if name in row}

    def _packs(self, rows: list[Row], counts: Counts) -> list[Row]:
        """The rows of this shard as packs."""
        lengths = array("I", (len(row["input_ids"]) for row in rows))
        packs = [
            joined([rows[place] for place in pack], separate=self.plan.separate)
            for pack in best_fit(lengths, self.plan.max_length)
        ]
        counts.packs = len(packs)
        return packs
