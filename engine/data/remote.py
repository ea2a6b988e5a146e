"""Sources that lie elsewhere: an object of a store, a file of a server, copied to this machine once for each version of it.

`s3://bucket/rows.jsonl` and its like go through fsspec and the package of that kind of store, which looks for keys and
endpoints where it always does. A copy is an entry among the prepared data in the user's cache: whole or absent, listed and
removed like them.
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from engine.config.files import REMOTE, scheme_of
from engine.data.cache_entries import NOTE, Held, cache_folder, locked
from engine.errors import DataError, visible, without_secrets

CHUNK = 1 << 20
KEEP_FREE = 512 << 20
PATIENCE = 60.0
"""Seconds in which a store has to give something."""
TRIES, PAUSE = 3, 2.0
"""How often an object is asked for, and seconds before the second time, twice as many before each later one."""
_LOOK = 0.1
_MISSING, _FORBIDDEN = (404, 410), (401, 403)
_NO_SUCH = ("RepositoryNotFoundError", "RevisionNotFoundError", "EntryNotFoundError", "RemoteEntryNotFoundError")
"""What the hub's client says of a repository, a revision or a file that is not there; of the first the hub answers 401."""
"""What HTTP says where nothing is, and where one may not look."""
_VOLATILE = ("url", "partial", "name", "mimetype")
"""What a file system says of an object that is not about its content."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Copy:
    """An object on this machine; as long as this is there, nobody removes it."""

    file: Path
    version: str
    """What tells this version of the object from any other object or version."""
    held: Held


def local_copy(url: str, on_progress: Progress | None = None) -> Copy:
    """The object as it is now, fetched unless this very version is here. `on_progress` is called with what is done, bytes
    and all bytes, and may raise. Raises `DataError` where it cannot be had."""
    shown = visible(without_secrets(url))
    progress = on_progress or (lambda what, done, total: None)
    files, place = _file_system(url, shown)

    def look() -> Any:
        return _Waiting(lambda _: files.info(place)).result(shown, lambda: progress("fetching", 0, 0))

    about = _retried(look, progress)
    if about.get("type") == "directory":
        raise DataError("is a folder", "Name one of its files; several are several sources.", path=shown)
    version = {str(key): str(value) for key, value in about.items() if key not in _VOLATILE}
    key = hashlib.sha256(json.dumps([url, version], sort_keys=True).encode()).hexdigest()[:32]
    store = cache_folder(None)
    try:
        store.mkdir(parents=True, exist_ok=True)
        folder = store / key
        with locked(folder, progress) as report:
            if not (folder / NOTE).is_file():
                _retried(lambda: _fetch(files, place, shown, about, folder, report), report)
            held = Held(folder)
        name = json.loads((folder / NOTE).read_text("utf-8"))["copy"]["file"]
    except OSError as problem:
        reason = problem.strerror or problem
        raise DataError(
            f"cannot be kept in {visible(str(store))} ({reason})", "Free some space there.", path=shown
        ) from None
    return Copy(folder / name, key, held)


def _file_system(url: str, shown: str) -> tuple[Any, str]:
    """The file system of an address, and the object's name in it."""
    from fsspec.core import url_to_fs

    try:
        files, place = url_to_fs(url)
    except (ImportError, ValueError) as problem:
        package = REMOTE.get(scheme_of(url))
        todo = f"pip install {package}" if package else f"Kinds that are read: {', '.join(sorted(REMOTE))}."
        raise DataError(f"cannot be fetched ({first_line(problem)})", todo, path=shown) from None
    return files, str(place)


class _Failed(DataError):
    """What may go well when it is tried again."""


def _retried(work: Callable[[], Any], on_progress: Progress) -> Any:
    """What the work gives; a connection that fails is tried again. Raises `DataError`, and what `on_progress` does."""
    for again in range(1, TRIES):
        try:
            return work()
        except _Failed:
            end = time.monotonic() + PAUSE * 2 ** (again - 1)
            while time.monotonic() < end:
                on_progress("fetching", 0, 0)
                time.sleep(_LOOK)
    try:
        return work()
    except _Failed as failed:
        failed.hint = f"It was tried {TRIES} times. {failed.hint}"
        raise


class _Waiting:
    """Work in a thread of its own that is given up once it shows nothing for a while: some clients never time out."""

    def __init__(self, work: Callable[[_Waiting], Any]) -> None:
        self.done, self.left = 0, False
        self._found: Any = None
        self._problem: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="fetch", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[_Waiting], Any]) -> None:
        try:
            self._found = work(self)
        except Exception as problem:  # noqa: BLE001 - each store has errors of its own
            self._problem = problem

    def result(self, shown: str, meanwhile: Callable[[], None]) -> Any:
        """What the work gave, once it has; `meanwhile` is called again and again. Raises `DataError`."""
        last, moved = -1, time.monotonic()
        try:
            while self._thread.is_alive():
                self._thread.join(_LOOK)
                meanwhile()
                if self.done != last:
                    last, moved = self.done, time.monotonic()
                if time.monotonic() - moved > PATIENCE:
                    raise DataError(f"nothing came for {PATIENCE:g} s", "See whether the store answers.", path=shown)
        finally:
            self.left = True
        problem: BaseException | None = self._problem
        if isinstance(problem, FileNotFoundError):
            problem = _other_reason(problem)
            if problem is None:
                raise DataError("there is no such object", "Check its address.", path=shown)
        elif isinstance(problem, OSError) and problem.filename:
            raise problem  # of this machine
        if problem is not None and (
            isinstance(problem, PermissionError) or getattr(problem, "status", None) in _FORBIDDEN
        ):
            raise DataError(
                f"may not be read ({first_line(problem)})",
                "See with which keys you are known there.",
                path=shown,
            )
        if problem is not None:
            raise _Failed(f"cannot be fetched ({first_line(problem)})", "See whether the store answers.", path=shown)
        return self._found


def _other_reason(problem: FileNotFoundError) -> BaseException | None:
    """Why fsspec says of a server's file that it is missing, where that is another reason: it says so of whatever a server
    answers, and where none does."""
    cause = problem.__cause__
    if cause is None or type(cause).__name__ in _NO_SUCH:
        return None
    status = getattr(cause, "status", None) or getattr(getattr(cause, "response", None), "status_code", None)
    if status is not None:
        return None if status in _MISSING else cause
    return cause if isinstance(cause, OSError) or type(cause).__module__.startswith("aiohttp") else None


def _fetch(files: Any, place: str, shown: str, about: Mapping[str, Any], folder: Path, on_progress: Progress) -> None:
    """Fetch the object into this folder, which is there once all of it is."""
    total = int(about.get("size") or 0)
    if shutil.disk_usage(folder.parent).free - total < KEEP_FREE:
        raise DataError(
            f"its {total:,} bytes do not fit onto the disk of {visible(str(folder.parent))} (512 MiB are kept free)",
            "Free some space there, or let WORKBENCH_CACHE name a roomier folder.",
            path=shown,
        )
    name = _name(place)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))

    def copy(waiting: _Waiting) -> None:
        with files.open(place, "rb") as source, (made / name).open("wb") as target:
            while not waiting.left and (chunk := source.read(CHUNK)):
                target.write(chunk)
                waiting.done += len(chunk)
            target.flush()
            os.fsync(target.fileno())

    waiting = _Waiting(copy)
    try:
        waiting.result(shown, lambda: on_progress("fetching", waiting.done, max(total, waiting.done)))
        on_progress("fetching", waiting.done, max(total, waiting.done))  # an object may be here before one looks
        if total and waiting.done != total:
            raise _Failed(f"{waiting.done:,} of its {total:,} bytes came", "Start again.", path=shown)
        note = {"copy": {"sources": [shown], "file": name}}
        (made / NOTE).write_text(json.dumps(note), "utf-8")
        os.rename(made, folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _name(place: str) -> str:
    """A name on this machine that ends as the object's does, since endings tell formats."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", posixpath.basename(urlsplit(place).path))[-100:].lstrip(".")
    return name if name and name != NOTE else f"rows-{name}"


def first_line(problem: BaseException) -> str:
    """The first line of what an error says, shown safely and without secrets."""
    text = visible(without_secrets(str(problem))).strip()
    return (text.splitlines()[0][:300] if text else type(problem).__name__).rstrip(".")
