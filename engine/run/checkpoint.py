"""Checkpoints that are whole or absent: write into `checkpoint-N.tmp`, commit, and only then does it have its name.

`commit` makes every file durable, lists sizes and hashes in COMMIT.json, makes that durable, and renames the folder.
A checkpoint is valid if COMMIT.json parses and every file has its size (and hash, where asked). Resume takes the newest
valid one and says which it skipped and why. A checkpoint is deleted only after a newer one is valid, two always stay.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from engine.errors import WorkbenchError, visible
from engine.run.events import disk_full
from engine.run.sizes import size_text
from engine.run.store import RunFolder, open_inside, sync_folder

COMMIT = "COMMIT.json"
KEEP_AT_LEAST = 2
# What TRL and transformers write beside a checkpoint and must not stay: this one pickles the hub token in clear.
UNWANTED = frozenset({"training_args.bin"})
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SCANT = 64 << 10
"""Free bytes below which a write that failed is taken to have found no room."""
_NAME = re.compile(r"checkpoint-(0|[1-9][0-9]{0,17})")


def step_of(path: Path) -> int | None:
    found = _NAME.fullmatch(path.name)
    return int(found[1]) if found else None


def begin(folder: RunFolder, step: int) -> Path:
    """An empty `checkpoint-N.tmp` to write into. Raises WorkbenchError if the disk has no room for another checkpoint."""
    newest = next((info for path in _newest_first(folder) if (info := read_commit(path))), None)
    if newest:
        _need_room(folder, int(1.1 * sum(entry["size"] for entry in newest["files"].values())))
    tmp = folder.checkpoints / f"checkpoint-{step}.tmp"
    if tmp.is_symlink() or tmp.exists():
        _discard(tmp)
    tmp.mkdir(mode=0o700)
    return tmp


def commit(tmp: Path, info: Mapping[str, Any]) -> Path:
    """Make `checkpoint-N.tmp` durable and give it its name; returns the new path.

    `info` goes into COMMIT.json (step, config hash, versions, RNG kinds, data cursor, ...). A checkpoint of that name
    from an earlier try is replaced. Raises WorkbenchError on a full disk, and on links and special files inside.
    """
    final = tmp.with_suffix("")
    step = step_of(final)
    if tmp.suffix != ".tmp" or step is None:
        raise ValueError(f"{tmp}: not a name made by begin()")
    try:
        files = {path.relative_to(tmp).as_posix(): _seal(path) for path in _files(tmp) if path.name != COMMIT}
        text = json.dumps({"v": 1, "step": step, **info, "files": files}, indent=1)
        handle = open_inside(tmp / COMMIT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        for part in sorted((path for path in tmp.rglob("*") if path.is_dir()), reverse=True):
            sync_folder(part)
        sync_folder(tmp)
        if final.exists():
            _discard(final)
        os.rename(tmp, final)
        sync_folder(final.parent)
    except OSError as problem:
        if problem.errno in _NO_ROOM:
            raise disk_full(RunFolder(tmp.parent.parent), size_of(tmp), problem) from problem
        raise
    return final


def without_room(tmp: Path, problem: Exception) -> WorkbenchError | None:
    """The one sentence for writing into `checkpoint-N.tmp` on a full disk, its half removed; None for any other failure.

    Libraries that write the files say it in words of their own, or only that a file ended early.
    """
    space = os.statvfs(tmp)
    told = getattr(problem, "errno", None) in _NO_ROOM or os.strerror(errno.ENOSPC) in str(problem)
    if not told and space.f_bavail * space.f_frsize >= _SCANT:
        return None
    _discard(tmp)
    space = os.statvfs(tmp.parent)
    free = size_text(space.f_bavail * space.f_frsize)
    return WorkbenchError(
        f"{RunFolder(tmp.parent.parent).id}: the disk is full: {tmp.stem} found no room; {free} are free without it.",
        "Free some space, then resume the run.",
    )


def _files(tmp: Path) -> Iterator[Path]:
    for path in sorted(tmp.rglob("*")):
        if path.name in UNWANTED:
            path.unlink()
        elif path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise WorkbenchError(f"{visible(str(path))}: is not a plain file; a checkpoint holds only those.")
        elif path.is_file():
            yield path


def _seal(path: Path) -> dict[str, Any]:
    """Size and hash of one file, made durable."""
    handle = open_inside(path, os.O_RDONLY)
    try:
        digest, size = _hash(handle)
        os.fsync(handle)
    finally:
        os.close(handle)
    return {"size": size, "sha256": digest}


def _hash(handle: int) -> tuple[str, int]:
    digest, size = hashlib.sha256(), 0
    while block := os.read(handle, 1 << 20):
        digest.update(block)
        size += len(block)
    return digest.hexdigest(), size


def read_commit(path: Path) -> dict[str, Any] | None:
    """COMMIT.json of a checkpoint, if it is there and whole."""
    try:
        handle = os.open(path / COMMIT, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with os.fdopen(handle, "rb") as file:
            found = json.loads(file.read())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("files"), dict):
        return None
    for name, entry in found["files"].items():
        if (
            not isinstance(entry, dict)
            or type(entry.get("size")) is not int
            or not isinstance(entry.get("sha256"), str)
        ):
            return None
        if name.startswith("/") or ".." in name.split("/"):
            return None
    return found


def problem_with(path: Path, *, hashes: bool = False) -> str:
    """Why this checkpoint cannot be used, in a few words; empty if it is whole."""
    if path.is_symlink() or not path.is_dir():
        return "is not a folder"
    info = read_commit(path)
    if info is None:
        return f"{COMMIT} is missing or damaged"
    for name, entry in info["files"].items():
        try:
            handle = open_inside(path / name, os.O_RDONLY | os.O_NONBLOCK)
        except (OSError, WorkbenchError):
            return f"{visible(name)} is missing"
        try:
            size = os.fstat(handle).st_size
            if size != entry["size"]:
                return f"{visible(name)} has {size} bytes instead of {entry['size']}"
            if hashes and _hash(handle)[0] != entry["sha256"]:
                return f"{visible(name)} has changed since it was saved"
        finally:
            os.close(handle)
    known = {*info["files"], COMMIT}
    for found in path.rglob("*"):
        name = found.relative_to(path).as_posix()
        if not found.is_dir() and name not in known and not found.name.startswith("."):
            return f"{visible(name)} was not there when it was saved"
    return ""


def is_valid(path: Path, *, hashes: bool = False) -> bool:
    return not problem_with(path, hashes=hashes)


def _newest_first(folder: RunFolder) -> list[Path]:
    try:
        found = [path for path in folder.checkpoints.iterdir() if step_of(path) is not None]
    except FileNotFoundError:
        return []
    return sorted(found, key=lambda path: step_of(path) or 0, reverse=True)


def newest_valid(folder: RunFolder, *, hashes: bool = True) -> tuple[Path | None, list[tuple[Path, str]]]:
    """The newest whole checkpoint, and those newer than it with the reason why they were skipped."""
    skipped: list[tuple[Path, str]] = []
    for path in _newest_first(folder):
        reason = problem_with(path, hashes=hashes)
        if not reason:
            return path, skipped
        skipped.append((path, reason))
    return None, skipped


def prune(folder: RunFolder, keep: int) -> list[Path]:
    """Delete all but the `keep` newest valid checkpoints (never fewer than two) and return what went.

    Invalid ones older than the newest valid one go too. Nothing goes while no checkpoint is valid.
    """
    keep, valid, gone = max(keep, KEEP_AT_LEAST), 0, []
    for path in _newest_first(folder):
        if is_valid(path):
            valid += 1
            doomed = valid > keep
        else:
            doomed = valid > 0
        if doomed:
            _discard(path)
            gone.append(path)
    return gone


def collect(folder: RunFolder) -> list[Path]:
    """Remove what an earlier worker left half done. Call with the run's lock held, before the first save.

    A `.tmp` whose COMMIT.json is whole was complete (its worker died just before the rename): it gets its name.
    """
    gone = []
    for path in sorted(folder.checkpoints.iterdir()):
        if path.name.startswith(".trash-"):
            _remove(path)
            gone.append(path)
        elif path.suffix == ".tmp" and step_of(path.with_suffix("")) is not None:
            final = path.with_suffix("")
            if not final.exists() and is_valid(path, hashes=True):
                os.rename(path, final)
                sync_folder(folder.checkpoints)
            else:
                _discard(path)
                gone.append(path)
    return gone


def size_of(path: Path) -> int:
    """Bytes of all files below `path`."""
    return sum(found.lstat().st_size for found in path.rglob("*") if found.is_file() and not found.is_symlink())


def _discard(path: Path) -> None:
    """Take the name away first, in one step; a half-deleted folder never looks like a checkpoint."""
    trash = path.with_name(f".trash-{path.name}-{secrets.token_hex(4)}")
    os.rename(path, trash)
    sync_folder(path.parent)
    _remove(trash)


def _remove(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def _need_room(folder: RunFolder, needed: int) -> None:
    space = os.statvfs(folder.path)
    if space.f_bavail * space.f_frsize < needed:
        raise disk_full(folder, needed, OSError(errno.ENOSPC, "no room for another checkpoint"))
