"""A view kept on disk beside the offset it stands for: what makes a long run open at once.

Anyone may delete it; a reader builds it again. It is believed only if the events file still begins, and reads just
before the offset, as it did when the snapshot was made, and only if every part of it is of the type and form that a view
has: the file may come from anywhere. A JSON header and plain binary columns; nothing is executed.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from engine.errors import WorkbenchError
from engine.run import inside
from engine.run.series import LEVELS, Series
from engine.run.store import RunFolder
from engine.run.view import MAX_SERIES, RANK_FIGURES, RunView

VERSION = 11
NAME = "view.bin"
_MAGIC = b"workbench view 1\n"
_LOOK = 4096
# Twice what the most and longest curves take.
MOST_BYTES = 1 << 29


def fingerprint(events: Path, offset: int) -> str:
    """A hash of the first bytes of the file and of those just before `offset`; empty where it is shorter."""
    try:
        with open(inside.open_file(events.parent, events), "rb") as file:
            head = file.read(min(offset, _LOOK))
            file.seek(max(0, offset - _LOOK))
            tail = file.read(min(offset, _LOOK))
    except (OSError, WorkbenchError):
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
    content = _MAGIC + len(text).to_bytes(8, "little") + text + body
    try:
        if folder is None:
            inside.make_folder(run, run.index, exist_ok=True)
        inside.replace(folder or run, (folder or run.index) / NAME, content)
    except (OSError, WorkbenchError):
        return False
    return True


def _pack(column: array[Any], columns: list[bytes]) -> list[Any]:
    columns.append(column.tobytes())
    return [column.typecode, len(column)]


def load(run: RunFolder, folder: Path | None = None) -> tuple[RunView, int] | None:
    """The view and the offset it stands for, or nothing if there is none that can be believed."""
    try:
        content = inside.read(folder or run, (folder or run.index) / NAME, most=MOST_BYTES)
    except (OSError, WorkbenchError):
        return None
    try:
        return _unpack(run, content)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError, MemoryError):
        return None


def _unpack(run: RunFolder, content: bytes) -> tuple[RunView, int] | None:
    if not content.startswith(_MAGIC):
        return None
    start = len(_MAGIC) + 8
    size = int.from_bytes(content[len(_MAGIC) : start], "little")
    header = json.loads(content[start : start + size], parse_constant=_no_number)
    body = memoryview(content)[start + size :]
    offset = header["offset"]
    if (
        header["version"] != VERSION
        or header["byteorder"] != sys.byteorder
        or header["crc"] != zlib.crc32(body)
        or type(offset) is not int
        or not 0 < offset <= inside.lstat(run, run.events).st_size
        or header["fingerprint"] != fingerprint(run.events, offset)
    ):
        return None
    check_fields(header["view"])
    view = RunView(**header["view"])
    if view._last_step is not None:
        view._last_step = (view._last_step[0], view._last_step[1])
    if len(header["series"]) > MAX_SERIES:
        raise ValueError("more curves than a view holds")
    place = 0
    for name, levels in header["series"].items():
        unpacked = []
        for dropped, parts in levels:
            columns = []
            for typecode, count in parts:
                column: array[Any] = array(typecode)
                if type(count) is not int or not 0 <= count <= len(body) or typecode not in ("q", "d"):
                    raise ValueError("a column has no length or no type")
                column.frombytes(body[place : place + count * column.itemsize])
                place += count * column.itemsize
                columns.append(column)
            unpacked.append((dropped, tuple(columns)))
        check_columns(unpacked)
        view.series[name] = Series.from_columns(unpacked)
    return view, offset


# -- what is believed of a file from outside -----------------------------------------------------------------------------
_STATES = ("starting", "running", "stopping", "finished", "stopped", "failed")
_LARGEST = 1 << 62
_TEXT, _WHOLE, _NUMBER = (str,), (int,), (int, float)
_NONE = (type(None),)
_ANY = (str, int, float, bool, list, dict, type(None))
# What `fold` puts into the lists of a view, by key; readers take these keys and types for granted.
_ENTRIES: dict[str, dict[str, tuple[type, ...]]] = {
    "receipt": {"feature": _TEXT, "requested": _ANY, "effective": _ANY, "count": _ANY, "detail": _TEXT},
    "samples": {"step": _WHOLE, "index": _WHOLE, "prompt": _TEXT, "completion": _TEXT},
    "rollouts": {
        **dict.fromkeys(("step", "group", "row", "count", "cut_off", "offset", "bytes"), _WHOLE),
        **dict.fromkeys(("reward", "reward_std"), _NUMBER + _NONE),
        "replayed_from": _WHOLE + _NONE,
        "prompt": _TEXT,
        "rewards": (dict,),
    },
    "checkpoints": {
        "step": _WHOLE + _NONE,
        "path": _TEXT,
        "bytes": _WHOLE + _NONE,
        "seconds": _NUMBER + _NONE,
        "state": _TEXT,
    },
    "findings": dict.fromkeys(("path", "severity", "rule", "message"), _TEXT),
    "controls": dict.fromkeys(("do", "status", "message"), _TEXT),
    "restarts": {"step": _WHOLE, "message": _TEXT},
    "diverged": {"step": _WHOLE + _NONE, "what": _TEXT},
    "ranks": dict.fromkeys(RANK_FIGURES, _NUMBER + _NONE),
    "superseded": dict.fromkeys(("segment", "above", "to", "points"), _WHOLE),
    "progress": {"what": _TEXT, "done": _NUMBER + _NONE, "total": _NUMBER + _NONE, "unit": _TEXT},
}
_KINDS: dict[str, tuple[type, ...]] = {
    "str": _TEXT,
    "int": _WHOLE,
    "float": _NUMBER,
    "list": (list,),
    "dict": (dict,),
    "tuple": (list,),
    "None": _NONE,
}

_NUMBERS = ("latest", "pause_steps", "_pause_costs", "_paused_at")
_LISTS: dict[str, tuple[type, ...]] = {
    "cause_lines": _TEXT,
    "_pauses_since": _TEXT,
    "experts": _TEXT,
    "expert_layers": _WHOLE,
    "gpu": (dict,),
}


def check_fields(values: Mapping[str, Any]) -> None:
    """Whether these are the fields of a view, of the types that the view declares. Raises ValueError or KeyError."""
    declared = {field.name: str(field.type) for field in fields(RunView) if field.name != "series"}
    if values.keys() != declared.keys() or values["state"] not in _STATES:
        raise ValueError("other fields than a view has")
    for name, kind in declared.items():
        value = values[name]
        _check(value, tuple(one for part in kind.split(" | ") for one in _KINDS[part.partition("[")[0]]))
        if name in _NUMBERS or (name == "_last_step" and value):
            for field in value.values() if isinstance(value, dict) else value:
                _check(field, _NUMBER)
        if name in _LISTS:
            for field in value:
                _check(field, _LISTS[name])
        if name in _ENTRIES and value:
            entries = value.values() if name == "controls" else [value] if name == "progress" else value
            for entry in entries:
                _check_entry(entry, _ENTRIES[name])
    if min(values["pause_steps"].values(), default=1) < 1:
        raise ValueError("a pause at no step")
    if values["_last_step"] is not None and len(values["_last_step"]) != 2:
        raise ValueError("the last step has no time")


def _check_entry(entry: Any, wanted: Mapping[str, tuple[type, ...]]) -> None:
    if not isinstance(entry, dict) or entry.keys() != wanted.keys():
        raise ValueError("an entry has other keys than a view gives it")
    for key, kinds in wanted.items():
        _check(entry[key], kinds)
    for value in entry.get("rewards", {}).values():
        _check(value, _NUMBER + _NONE)


def _check(value: Any, kinds: tuple[type, ...]) -> None:
    if type(value) not in kinds or (type(value) in _NUMBER and abs(value) > _LARGEST):
        raise ValueError(f"{type(value).__name__} is not what stands here")


def check_columns(levels: Sequence[tuple[Any, tuple[array[Any], ...]]]) -> None:
    """Whether these are the levels of one curve: whole, in order, of finite numbers. Raises ValueError."""
    if not 1 <= len(levels) <= LEVELS:
        raise ValueError("a curve has no levels or too many")
    for depth, (dropped, columns) in enumerate(levels):
        kinds = "".join(column.typecode for column in columns)
        steps = columns[0]
        if kinds != ("qdd" if depth else "qd") or len({len(column) for column in columns}) != 1:
            raise ValueError("a level has other columns than a curve")
        if type(dropped) is not int or not 0 <= dropped <= _LARGEST:
            raise ValueError("a level begins nowhere")
        if list(steps) != sorted(steps) or (steps and steps[0] < 0):
            raise ValueError("steps go back")
        if not all(math.isfinite(math.fsum(column)) for column in columns[1:]):
            raise ValueError("a value is no finite number")


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of a view")
