"""What lies in a folder of prepared data: entries with what they are made of, their size and when they were last used.

An entry is used as long as a process holds it (`Held`), wherever that process and its run are; such a one is never removed.
Torch-free, and it makes no folder: windows and commands read it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from engine.caches import user_cache
from engine.errors import WorkbenchError, redact, visible

Progress = Callable[[str, int, int], None]
"""Called with what is done, how much of it, and of how much; may raise `Cancelled`."""
WAIT_SECONDS = 0.5
ELSEWHERE = "waits: another process prepares these rows"
KEY = re.compile(r"[0-9a-f]{32}")
NOTE = "meta.json"
"""In each entry: what it is made of. Its date is when the entry was last used."""


def cache_folder(folder: str | None) -> Path:
    """The folder of prepared data: the one named by a config, else in the user's cache."""
    return Path(folder) if folder else user_cache() / "prepared"


@contextlib.contextmanager
def locked(entry: Path, on_progress: Progress) -> Iterator[Progress]:
    """Holds the lock of an entry's name, and yields what its maker reports to: who waits for the lock meanwhile reads it.

    While another process holds the lock, `on_progress` hears every half second how far that one is; what it raises ends
    the wait.
    """
    lock = FileLock(entry.with_name(f".{entry.name}.lock"))
    state = entry.with_name(f".{entry.name}.progress")
    while True:
        try:
            lock.acquire(timeout=WAIT_SECONDS)
            break
        except Timeout:
            on_progress(*_elsewhere(state))
    told = -WAIT_SECONDS

    def report(what: str, done: int, total: int) -> None:
        nonlocal told
        if time.monotonic() - told >= WAIT_SECONDS or 0 < total <= done:
            told = time.monotonic()
            beside = state.with_name(f"{state.name}.new")
            # On a full disk those who wait learn less; what is made here says itself that it cannot be written.
            with contextlib.suppress(OSError):
                beside.write_text(json.dumps([what, done, total]), "utf-8")
                os.replace(beside, state)
        on_progress(what, done, total)

    try:
        state.unlink(missing_ok=True)  # of a maker that was killed
        yield report
    finally:
        with contextlib.suppress(OSError):
            state.unlink(missing_ok=True)
        lock.release()


def _elsewhere(state: Path) -> tuple[str, int, int]:
    """What the process that holds an entry's lock is at, as its own progress: what, done, total."""
    try:
        what, done, total = json.loads(state.read_text("utf-8"))
        return f"{ELSEWHERE} ({visible(str(what))})", int(done), int(total)
    except (OSError, ValueError, TypeError):
        return ELSEWHERE, 0, 0  # it has said nothing yet


class Held:
    """An entry in use: until this is let go, or its process ends in whatever way, nobody removes the entry."""

    def __init__(self, entry: Path) -> None:
        handle = os.open(entry / NOTE, os.O_RDONLY)
        self._end = weakref.finalize(self, os.close, handle)
        fcntl.flock(handle, fcntl.LOCK_SH)
        # The date of the note is when the entry was last used; one that is another person's keeps its date.
        with contextlib.suppress(OSError):
            os.utime(handle)


@dataclass(frozen=True)
class Entry:
    """Prepared rows, the shards of a stream, or a copy of a source that lies elsewhere, on disk."""

    key: str
    folder: Path
    kind: Literal["rows", "stream", "copy"]
    bytes: int
    used: float
    """When it was last used, in seconds since 1970."""
    rows: int | None
    """Prepared rows, or packs; None for a stream or a copy."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """What it is made of: `sources`, `split`, `method`, `tokenizer`, `template`, `max_length`, `packing`; empty for an
    entry that does not say."""

    @property
    def in_use(self) -> bool:
        """Whether some process holds it."""
        with _alone(self.folder) as free:
            return not free

    def as_json(self) -> dict[str, Any]:
        """Plain JSON."""
        named = ("sources", "split", "method", "tokenizer", "template", "max_length", "packing")
        return {
            "id": self.key,
            "kind": self.kind,
            "bytes": self.bytes,
            "rows": self.rows,
            "last_used": self.used,
            "in_use": self.in_use,
            **{name: self.about.get(name) for name in named},
        }


def entries(folder: Path) -> list[Entry]:
    """The entries of a folder of prepared data, the one used last first. Raises WorkbenchError for one that cannot be read."""
    try:
        found = [entry for path in _folders(folder) if (entry := _entry(path)) is not None]
    except OSError as problem:
        place = visible(redact(str(folder)))
        raise WorkbenchError(
            f"{place} cannot be read ({problem.strerror or problem}).", "See whose folder it is."
        ) from None
    return sorted(found, key=lambda entry: (-entry.used, entry.key))


def remove(entry: Entry) -> bool:
    """Remove an entry; False, and it stays, where a process uses it or makes it anew. Raises WorkbenchError."""
    beside = entry.folder.with_name(f".{entry.key}.{os.getpid()}.tmp")
    try:
        # Whoever opens the entry holds this lock until it holds the entry.
        with FileLock(entry.folder.with_name(f".{entry.key}.lock"), timeout=0), _alone(entry.folder) as free:
            if not free:
                return False
            os.rename(entry.folder, beside)
        shutil.rmtree(beside)
    except Timeout:
        return False
    except FileNotFoundError:
        pass  # another has removed it
    except OSError as problem:
        place = visible(redact(str(entry.folder)))
        raise WorkbenchError(
            f"{place} cannot be removed ({problem.strerror or problem}).", "See whose folder it is."
        ) from None
    return True


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Whether nobody holds the entry; inside nobody takes hold of it either."""
    try:
        handle = os.open(folder / NOTE, os.O_RDONLY)
    except FileNotFoundError:
        yield True
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(handle)


def _folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as found:
            return [
                folder / each.name for each in found if KEY.fullmatch(each.name) and each.is_dir(follow_symlinks=False)
            ]
    except FileNotFoundError:
        return []


def _entry(folder: Path) -> Entry | None:
    """An entry; None for a folder that is none, or is being removed."""
    try:
        note = folder / NOTE
        meta, used, size = json.loads(note.read_text("utf-8")), note.stat().st_mtime, _size(folder)
        kind: Literal["rows", "stream", "copy"] = "copy" if "copy" in meta else "stream" if "stream" in meta else "rows"
        about = meta.get("about" if kind == "rows" else kind)
        counts = meta.get("counts") or {}
    except (OSError, ValueError, AttributeError):
        return None
    rows = (counts.get("packs") or counts.get("kept")) if kind == "rows" else None
    about = about if isinstance(about, dict) else {}
    return Entry(folder.name, folder, kind, size, used, rows, about)


def _size(folder: Path) -> int:
    """Bytes that the files of an entry take."""
    total = 0
    with os.scandir(folder) as found:
        for each in found:
            with contextlib.suppress(FileNotFoundError):
                total += each.stat(follow_symlinks=False).st_size
    return total


def unused_for(entry: Entry, seconds: float) -> bool:
    """Whether the entry was last used at least so long ago."""
    return time.time() - entry.used >= seconds
