"""The one writer of a run's events: whole lines, appended, numbered, durable within seconds.

It owns `seq`, `segment`, time stamps and the policy that thins long runs. A number that is not finite is written as
null and said once in a `diverged` event. `t` follows the monotonic clock from the writer's start, so a clock that is
set back never makes a run go back in time. Whoever writes must hold the run's lock.
"""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Self

from engine import figures
from engine.errors import WorkbenchError, without_secrets
from engine.run import inside
from engine.run.disk import guarded
from engine.run.lock import RunLock
from engine.run.store import RunFolder

SYNC_SECONDS = 5.0
MAX_LINE = 1 << 16
# Kinds that come often and may be lost with the last seconds of a machine that loses power.
_FREQUENT = frozenset({"metrics", "batch", "gpu", "progress", "ranks", "experts"})


@dataclass(frozen=True)
class Thinning:
    """Which steps are logged: each up to `thin_after`, then every `keep_every`-th (and always the last).

    `keep_every` keeps a run near 100,000 lines, however long it is.
    """

    logging_steps: int = 1
    max_steps: int | None = None
    thin_after: int = 10_000

    @property
    def keep_every(self) -> int:
        spare = (self.max_steps or 0) - self.thin_after
        wanted = max(1, math.ceil(spare / 90_000)) if spare > 0 else 1
        return math.ceil(wanted / self.logging_steps) * self.logging_steps

    def wants(self, step: int) -> bool:
        if step == self.max_steps:
            return True
        return step % (self.logging_steps if step <= self.thin_after else self.keep_every) == 0

    def started(self) -> dict[str, int]:
        """The keys of the `started` event that state this policy."""
        return {"keep_every": self.keep_every, "thin_after": self.thin_after}


FINAL = frozenset({"finished", "stopped", "failed"})
# What is written into the room that is reserved for it on a full disk.
_LAST = FINAL | {"control"}


def last_numbers(path: os.PathLike[str] | str) -> tuple[int, int, int, bool]:
    """Of the events file: (last seq, last segment, bytes up to the last whole line, whether a final event ends it).

    -1 where there is no event yet. Reads from the end; damaged lines are passed over.
    """
    place = os.path.abspath(path)
    with open(inside.open_file(os.path.dirname(place), place), "rb") as file:
        whole = _complete_bytes(file)
        for line in _lines_backward(file, whole):
            try:
                event = json.loads(line.lstrip(b"\0"))
                return int(event["seq"]), int(event["segment"]), whole, event["kind"] in FINAL
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
    return -1, -1, whole, False


def last_final(path: os.PathLike[str] | str) -> dict[str, Any] | None:
    """The event that says how a run ended, where it is the last one; None for one that was cut off, or whose file is not there."""
    place = os.path.abspath(path)
    try:
        with open(inside.open_file(os.path.dirname(place), place), "rb") as file:
            for line in _lines_backward(file, _complete_bytes(file)):
                try:
                    event = json.loads(line.lstrip(b"\0"))
                    return event if event["kind"] in FINAL else None
                except (ValueError, KeyError, TypeError, RecursionError):
                    continue
    except (OSError, WorkbenchError):
        pass
    return None


_BLOCK = 1 << 16


def _complete_bytes(file: BinaryIO) -> int:
    """The length of the file without a torn last line."""
    start = file.seek(0, os.SEEK_END)
    while start > 0:
        end, start = start, max(0, start - _BLOCK)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
    return 0


def _lines_backward(file: BinaryIO, end: int) -> Iterator[bytes]:
    """The lines of the first `end` bytes, last first. A line far beyond MAX_LINE comes without its end."""
    carry, start = b"", max(0, end - 1)
    while start > 0:
        stop, start = start, max(0, start - _BLOCK)
        file.seek(start)
        first, *rest = (file.read(stop - start) + carry).split(b"\n")
        yield from reversed(rest)
        carry = first if len(first) <= 16 * MAX_LINE else b""
    if end:
        yield carry


class EventWriter:
    """Appends events to a run's `events.jsonl`; the caller holds the run's lock.

    `segment` is counted on by one from the file's last where it is not given: each start or resume is a segment.
    Opening cuts a torn last line. Raises StorageError when the disk takes no more.
    """

    def __init__(self, folder: RunFolder, segment: int | None = None) -> None:
        self.folder = folder
        self._handle = inside.open_file(folder, folder.events, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.seq, last_segment, whole, _ = last_numbers(folder.events)
        if os.fstat(self._handle).st_size > whole:
            os.ftruncate(self._handle, whole)
        self.segment = last_segment + 1 if segment is None else segment
        self._encode = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=_plain).encode
        self._clock = time.time() - time.monotonic()
        self._synced = time.monotonic()
        self._not_finite: set[str] = set()

    def write(self, kind: str, **payload: Any) -> int:
        """Append one event; returns its seq."""
        return self._write_at(time.monotonic(), kind, payload)

    def _write_at(self, now: float, kind: str, payload: dict[str, Any]) -> int:
        seq = self.seq + 1
        event = {
            "v": 1,
            "seq": seq,
            "t": round(self._clock + now, 3),
            "rank": 0,
            "segment": self.segment,
            "kind": kind,
            **(payload if kind in _FREQUENT else _hidden(payload)),
        }
        not_finite: list[str] = []
        try:
            text = self._encode(event)
        except ValueError:
            event, not_finite = _without_nan(event)
            text = self._encode(event)
        if len(text) > MAX_LINE:
            text = self._encode(_shortened(event))
        self._append(text.encode("ascii") + b"\n", kind)
        self.seq = seq
        if kind not in _FREQUENT or now - self._synced >= SYNC_SECONDS:
            self.sync()
        if kind == "metrics" and (not_finite or self._not_finite):
            self._emit_diverged(now, payload, not_finite)
        return seq

    def sync(self) -> None:
        self._guarded(0, lambda: getattr(os, "fdatasync", os.fsync)(self._handle))
        self._synced = time.monotonic()

    def close(self) -> None:
        if self._handle >= 0:
            self.sync()
            os.close(self._handle)
            self._handle = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, line: bytes, kind: str) -> None:
        before = os.fstat(self._handle).st_size

        def write() -> None:
            self._append_line(line, before)

        # The reserved room is for the last word alone; a run that cannot log ends while that can still be said.
        self._guarded(len(line), (lambda: self.folder.with_ballast(write)) if kind in _LAST else write)

    def _guarded(self, count: int, work: Callable[[], None]) -> None:
        guarded(self.folder.events, lambda: f"{figures.size(count)} needed", work)

    def _append_line(self, line: bytes, before: int) -> None:
        """One write; a line that went in only in part is taken out again, so that no reader sees half of it."""
        try:
            done = os.write(self._handle, line)
            if done < len(line):
                done += os.write(self._handle, line[done:])
        except OSError:
            os.ftruncate(self._handle, before)
            raise
        if done < len(line):
            os.ftruncate(self._handle, before)
            raise OSError(errno.ENOSPC, "the line could only be written in part")

    def _emit_diverged(self, now: float, payload: dict[str, Any], not_finite: list[str]) -> None:
        """Once when a number stops being finite; again only after it was finite in between."""
        new = [name for name in not_finite if name not in self._not_finite]
        self._not_finite = (self._not_finite - payload.keys()) | set(not_finite)
        if new:
            self._write_at(now, "diverged", {"step": payload.get("step"), "what": ", ".join(new)})


def append(folder: RunFolder, segment: int, *events: Mapping[str, Any]) -> None:
    """Write events (`kind` among their values) where no worker does any more. Raises RunBusy where one does, and StorageError."""
    lock = RunLock(folder).acquire_soon()
    try:
        with EventWriter(folder, segment=segment) as writer:
            for event in events:
                writer.write(**event)
    finally:
        lock.release()


def _plain(value: Any) -> Any:
    """Numbers of numpy and torch (anything with `.item()`), paths, sets and tuples as plain JSON."""
    if hasattr(value, "item"):
        return value.item()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} cannot stand in an event")


def _without_nan(event: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The event with every number that is not finite as null, and the names of those keys."""
    names: list[str] = []

    def clean(value: Any, name: str) -> Any:
        if hasattr(value, "item"):
            value = value.item()
        if isinstance(value, float) and not math.isfinite(value):
            names.append(name)
            return None
        if isinstance(value, dict):
            return {key: clean(inner, str(key)) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [clean(inner, name) for inner in value]
        return value

    return {key: clean(value, key) for key, value in event.items()}, names


def _hidden(value: Any) -> Any:
    """The same without the secrets in its texts."""
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, dict):
        return {name: _hidden(item) for name, item in value.items()}
    return [_hidden(item) for item in value] if isinstance(value, (list, tuple)) else value


def _shortened(event: dict[str, Any]) -> dict[str, Any]:
    """The event with long texts and lists cut, and `cut` saying so."""

    def cut(value: Any, room: int) -> Any:
        if isinstance(value, str) and len(value) > room:
            return value[:room] + "…"
        if isinstance(value, dict):
            return {key: cut(inner, room) for key, inner in list(value.items())[:64]}
        if isinstance(value, (list, tuple)):
            return [cut(inner, room) for inner in value[:64]]
        return value

    for room in (4000, 1000, 200, 40):
        short = {key: cut(value, room) for key, value in event.items()} | {"cut": True}
        if len(json.dumps(short, default=_plain, allow_nan=False)) <= MAX_LINE:
            return short
    return {key: event[key] for key in ("v", "seq", "t", "rank", "segment", "kind")} | {"cut": True}
