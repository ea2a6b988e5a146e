"""The record of the rows that a run trains on: `data.json` in the run folder, one entry a split.

It holds what a resume is compared with: a hash of each prepared row (ids, labels and whatever else the row teaches), the
fixed rows token by token, where the prepared rows lie in the cache, and size and date of each source file. The worker
writes it; readers take a missing one for a run that kept none, and refuse a damaged one.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import WorkbenchError
from engine.run import inside
from engine.run.store import RunFolder, called

NAME = "data.json"
VERSION = 1
# Rows that are hashed one by one: beyond them all rows share one hash, so that the record stays within a few megabytes.
MOST = 250_000


class RecordDamaged(WorkbenchError):
    """The record is there and cannot be read."""


class DataChanged(WorkbenchError):
    """The rows teach otherwise than those that a run was trained on; it goes on only where a person accepts that."""

    def __init__(self, run: RunFolder, messages: Sequence[str]) -> None:
        super().__init__(
            "; ".join(messages) + ".",
            f"`workbench preview {run.config} --against {called(run)}` shows the difference token by token; put the rows back, "
            f"or go on knowingly with `workbench resume {called(run)} --accept-data`.",
        )
        self.said = list(messages)


@dataclass
class RowHashes:
    """A hash of each prepared row, in order, beside the number of the row that it was made from."""

    numbers: array[int] = field(default_factory=lambda: array("q"))
    hashes: array[int] = field(default_factory=lambda: array("Q"))
    rest: str = ""
    """The hash of all rows after the first `MOST`; empty where there are none."""

    def __post_init__(self) -> None:
        self._rest = hashlib.blake2b(digest_size=16)

    def add(self, number: int, row: Mapping[str, Any]) -> None:
        """Take in one row, which was made from row `number`."""
        digest = row_digest(row)
        if len(self.numbers) < MOST:
            self.numbers.append(number)
            self.hashes.append(int.from_bytes(digest, "little"))
        else:
            self._rest.update(number.to_bytes(8, "little") + digest)
            self.rest = self._rest.hexdigest()

    def by_number(self) -> dict[int, tuple[int, ...]]:
        """The hashes of what was made of each row: one, or several where it was split or repeated."""
        numbers: dict[int, tuple[int, ...]] = {}
        for number, value in zip(self.numbers, self.hashes, strict=True):
            numbers[number] = (*numbers.get(number, ()), value)
        return numbers

    def as_json(self) -> dict[str, Any]:
        """Plain JSON; the columns as base64 of little-endian 64-bit numbers."""
        return {"numbers": _packed(self.numbers), "hashes": _packed(self.hashes), "rest": self.rest}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> RowHashes:
        """What `as_json` gave. Raises ValueError, KeyError or TypeError for anything else."""
        numbers, hashes = _unpacked("q", document["numbers"]), _unpacked("Q", document["hashes"])
        if len(numbers) != len(hashes) or not isinstance(document["rest"], str):
            raise ValueError("the columns of the record are not of one length")
        return cls(numbers, hashes, document["rest"])


def row_digest(row: Mapping[str, Any]) -> bytes:
    """A hash of all that a prepared row teaches; its number is no part of it."""
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(row):
        if name == "row":
            continue
        value = row[name]
        digest.update(f"{name} ".encode())
        try:
            digest.update(array("q", value).tobytes())
        except TypeError:
            digest.update(json.dumps(value, sort_keys=True, default=str).encode())
    return digest.digest()


@dataclass(frozen=True)
class SplitRecord:
    """One split as the run was trained on it."""

    fingerprint: str
    prepared: str
    """The name of its prepared rows in the cache, where they may be gone."""
    hashes: RowHashes
    fixed: list[dict[str, Any]]
    sources: list[str]
    files: list[tuple[str, int, int]]
    """Path, size and date (in nanoseconds) of the sources' files."""

    def as_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {**vars(self), "hashes": self.hashes.as_json()}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> SplitRecord:
        """What `as_json` gave. Raises ValueError, KeyError or TypeError for anything else."""
        fixed = [dict(row) for row in document["fixed"]]
        if not all(isinstance(row.get("row"), int) for row in fixed):
            raise ValueError("a row of the record has no number")
        files = [(str(path), int(size), int(changed)) for path, size, changed in document["files"]]
        sources = [str(path) for path in document["sources"]]
        hashes = RowHashes.from_json(document["hashes"])
        return cls(str(document["fingerprint"]), str(document["prepared"]), hashes, fixed, sources, files)


def read(run: RunFolder) -> dict[str, SplitRecord] | None:
    """The record by split; None for a run that kept none. Raises RecordDamaged."""
    try:
        content = inside.read(run, NAME)
    except FileNotFoundError:
        return None
    try:
        document = json.loads(content)
        if document["version"] != VERSION:
            raise ValueError("another version")
        return {str(split): SplitRecord.from_json(entry) for split, entry in document["splits"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, binascii.Error):
        raise RecordDamaged(
            f"run {run.id}: its record of the rows it was trained on ({NAME}) is damaged, so today's rows cannot be "
            "compared with it.",
            f"`workbench resume {called(run)} --accept-data` goes on with the rows as they are.",
        ) from None


def write(run: RunFolder, splits: Mapping[str, SplitRecord]) -> None:
    """Put the record in place."""
    document = {"version": VERSION, "splits": {split: record.as_json() for split, record in splits.items()}}
    inside.replace(run, NAME, json.dumps(document))


def files_of(paths: Sequence[str]) -> list[tuple[str, int, int]]:
    """Size and date of the files at and below those paths that are local."""
    places = []
    for path in dict.fromkeys(paths):
        place = Path(path)
        files = sorted(place.rglob("*")) if place.is_dir() else [place]
        for file in files:
            if file.is_file():
                status = os.stat(file)
                places.append((str(file), status.st_size, status.st_mtime_ns))
    return places


def files_unchanged(record: Mapping[str, SplitRecord]) -> bool:
    """Whether each local source still has the files, with the sizes and dates, that the run was trained on. What was
    generated or came from the hub has none."""
    return all(files_of(split.sources) == split.files for split in record.values())


def _packed(column: array[int]) -> str:
    if sys.byteorder != "little":
        column = array(column.typecode, column)
        column.byteswap()
    return base64.b64encode(column.tobytes()).decode("ascii")


def _unpacked(kind: str, text: str) -> array[int]:
    column: array[int] = array(kind)
    column.frombytes(base64.b64decode(text, validate=True))
    if sys.byteorder != "little":
        column.byteswap()
    return column
