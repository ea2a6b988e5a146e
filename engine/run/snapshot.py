"""A view kept on disk beside the offset it stands for: what makes a long run open at once.

Anyone may delete it; a reader builds it again. It is believed only if the events file still begins, and reads just
before the offset, as it did when the snapshot was made. A JSON header and plain binary columns; nothing is executed.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import zlib
from array import array
from pathlib import Path
from typing import Any

from engine.run.series import Series
from engine.run.store import RunFolder
from engine.run.view import RunView

VERSION = 2
NAME = "view.bin"
_MAGIC = b"workbench view 1\n"
_LOOK = 4096


def fingerprint(events: Path, offset: int) -> str:
    """A hash of the first bytes of the file and of those just before `offset`; empty where it is shorter."""
    try:
        with open(events, "rb") as file:
            head = file.read(min(offset, _LOOK))
            file.seek(max(0, offset - _LOOK))
            tail = file.read(min(offset, _LOOK))
    except OSError:
        return ""
    if len(head) != min(offset, _LOOK) or len(tail) != min(offset, _LOOK):
        return ""
    return hashlib.sha256(head + tail).hexdigest()


def save(run: RunFolder, view: RunView, offset: int, folder: Path | None = None) -> bool:
    """Write the snapshot; False where that is not possible (a read-only or full disk), which costs nothing but time."""
    columns: list[bytes] = []
    curves = {
        name: [[dropped, [_pack(column, columns) for column in parts]] for dropped, parts in series.as_columns()]
        for name, series in view.series.items()
    }
    fields = {name: value for name, value in vars(view).items() if name != "series"}
    body = b"".join(columns)
    header = {
        "version": VERSION,
        "offset": offset,
        "fingerprint": fingerprint(run.events, offset),
        "byteorder": sys.byteorder,
        "crc": zlib.crc32(body),
        "view": fields,
        "series": curves,
    }
    text = json.dumps(header).encode()
    target = folder or run.index
    try:
        target.mkdir(mode=0o700, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target, prefix=".view.")
    except OSError:
        return False
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_MAGIC + len(text).to_bytes(8, "little") + text + body)
        os.replace(name, target / NAME)
    except OSError:
        Path(name).unlink(missing_ok=True)
        return False
    return True


def _pack(column: array[Any], columns: list[bytes]) -> list[Any]:
    columns.append(column.tobytes())
    return [column.typecode, len(column)]


def load(run: RunFolder, folder: Path | None = None) -> tuple[RunView, int] | None:
    """The view and the offset it stands for, or nothing if there is none that can be believed."""
    try:
        handle = os.open((folder or run.index) / NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with os.fdopen(handle, "rb") as file:
            content = file.read()
    except OSError:
        return None
    try:
        return _unpack(run, content)
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return None


def _unpack(run: RunFolder, content: bytes) -> tuple[RunView, int] | None:
    if not content.startswith(_MAGIC):
        return None
    start = len(_MAGIC) + 8
    size = int.from_bytes(content[len(_MAGIC) : start], "little")
    header = json.loads(content[start : start + size])
    body = memoryview(content)[start + size :]
    offset = header["offset"]
    if (
        header["version"] != VERSION
        or header["byteorder"] != sys.byteorder
        or header["crc"] != zlib.crc32(body)
        or not offset
        or header["fingerprint"] != fingerprint(run.events, offset)
    ):
        return None
    view = RunView(**header["view"])
    if view._last_step is not None:
        view._last_step = (view._last_step[0], view._last_step[1])
    place = 0
    for name, levels in header["series"].items():
        unpacked = []
        for dropped, parts in levels:
            columns = []
            for typecode, count in parts:
                column: array[Any] = array(typecode)
                column.frombytes(body[place : place + count * column.itemsize])
                place += count * column.itemsize
                columns.append(column)
            unpacked.append((dropped, tuple(columns)))
        view.series[name] = Series.from_columns(unpacked)
    return view, offset
