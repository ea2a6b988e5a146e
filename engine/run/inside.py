"""Every access below a run folder: each folder on the way is opened by its own name, and no link is ever followed.

A run folder may come from another person, another machine or an archive, so nothing in it is taken for what its name
says. What is opened must be a plain file or folder that belongs to the owner of the run folder; a link, a FIFO, a device
or another person's file is refused in one sentence, and opening never waits. Who may read the files may look at a run,
whoever owns it. `run` is the folder of the run, `path` a place below it, absolute or relative to it.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from engine.errors import WorkbenchError, visible

Place = str | os.PathLike[str]
READ_WITHIN = "WORKBENCH_READ_WITHIN"
"""The folders, as a JSON list, outside which a process that reads for an assistant opens no image that a row names."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_DEEPEST = 32
_LINK = "is a symbolic link; a run folder holds none"


class UnsafeRunFile(WorkbenchError):
    """Something in a run folder is no plain file or folder of the run's owner."""


def open_file(run: Place, path: Place, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """A descriptor of a plain file of the run, close-on-exec. Raises OSError, and UnsafeRunFile for anything else."""
    with _parent(run, path) as (folder, name, owner):
        try:
            # Looked at before it is opened as well: opening a device can already do something.
            _refuse_unless_file(os.stat(name, dir_fd=folder, follow_symlinks=False), owner, path, flags)
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
        try:
            handle = os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, mode, dir_fd=folder)
        except OSError as problem:
            if problem.errno == errno.ELOOP:
                raise _refused(path, _LINK) from problem
            raise
    try:
        _refuse_unless_file(os.fstat(handle), owner, path, flags)
        os.set_blocking(handle, True)
    except BaseException:
        os.close(handle)
        raise
    return handle


def read(run: Place, path: Place, most: int = -1) -> bytes:
    """The content of a plain file of the run, or its first `most` bytes."""
    with open(open_file(run, path), "rb") as file:
        return file.read(most)


def read_json(run: Place, path: Place, most: int) -> dict[str, Any]:
    """The mapping in a JSON file of the run; empty where it is missing, damaged, longer than `most` bytes or no mapping."""
    try:
        document = json.loads(read(run, path, most))
    except (OSError, ValueError, RecursionError, WorkbenchError):
        return {}
    return document if isinstance(document, dict) else {}


def replace(run: Place, path: Place, content: str | bytes, *, durable: bool = True) -> None:
    """Write `content` beside `path`, make it durable, and put it in place in one step. The file is private.

    A link or a FIFO that stands there is replaced itself. What is not `durable` may be lost where the machine goes.
    """
    with _parent(run, path) as (folder, name, _):
        temporary = f".{name}.{secrets.token_hex(4)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        handle = os.open(temporary, flags, 0o600, dir_fd=folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with _missing_is_fine():
                os.unlink(temporary, dir_fd=folder)
            raise
        if durable:
            os.fsync(folder)


def lstat(run: Place, path: Place) -> os.stat_result:
    """What stands at `path`, itself, whatever it is. Raises OSError where nothing does, and UnsafeRunFile on the way."""
    with _parent(run, path) as (folder, name, _):
        return os.stat(name, dir_fd=folder, follow_symlinks=False)


def exists(run: Place, path: Place) -> bool:
    """Whether anything stands there, be it a link that leads nowhere."""
    try:
        lstat(run, path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def names(run: Place, path: Place = "") -> list[str]:
    """The names in a folder of the run, sorted."""
    with open_folder(run, path) as handle:
        return sorted(os.listdir(handle))


def entries(run: Place, path: Place = "") -> Iterator[tuple[str, os.stat_result]]:
    """Everything below a folder of the run as (name relative to it, what it is); no link is followed."""
    with open_folder(run, path) as handle:
        yield from _below(handle, "", path)


def _below(folder: int, above: str, path: Place) -> Iterator[tuple[str, os.stat_result]]:
    if above.count("/") > _DEEPEST:
        raise _refused(path, f"holds folders more than {_DEEPEST} deep")
    for name in sorted(os.listdir(folder)):
        info = os.stat(name, dir_fd=folder, follow_symlinks=False)
        yield above + name, info
        if stat.S_ISDIR(info.st_mode):
            handle = os.open(name, _FOLDER, dir_fd=folder)
            try:
                yield from _below(handle, f"{above}{name}/", path)
            finally:
                os.close(handle)


def make_folder(run: Place, path: Place, *, exist_ok: bool = False) -> None:
    """A private folder of the run. With `exist_ok` one that is there is taken, if it is one."""
    with _parent(run, path) as (folder, name, _):
        try:
            os.mkdir(name, 0o700, dir_fd=folder)
        except FileExistsError:
            if not exist_ok:
                raise
    if exist_ok:
        with open_folder(run, path):
            return


def rename(run: Place, old: Place, new: Place) -> None:
    """Give what stands at `old` the name `new`, in one step; a link is renamed itself."""
    with _parent(run, old) as (source, before, _), _parent(run, new) as (target, after, _):
        os.rename(before, after, src_dir_fd=source, dst_dir_fd=target)


def remove(run: Place, path: Place) -> None:
    """Take away what stands at `path`: a folder with all that is in it, anything else itself."""
    with _parent(run, path) as (folder, name, _):
        if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            shutil.rmtree(name, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)


def sync(run: Place, path: Place = "") -> None:
    """Make the names in a folder of the run durable."""
    with open_folder(run, path) as handle:
        os.fsync(handle)


def identity(run: Place) -> list[int]:
    """Device and inode of the run's folder: other for a copy, whatever its files say."""
    info = os.stat(run, follow_symlinks=False)
    return [info.st_dev, info.st_ino]


@contextmanager
def open_folder(run: Place, path: Place = "") -> Iterator[int]:
    """A descriptor of a folder of the run (the run's own without `path`), for as long as the block lasts."""
    handle, _ = _walk(run, _parts(run, path))
    try:
        yield handle
    finally:
        os.close(handle)


@contextmanager
def _parent(run: Place, path: Place) -> Iterator[tuple[int, str, int]]:
    """(descriptor of the folder that holds `path`, the name in it, the run's owner)."""
    *above, name = _parts(run, path)
    handle, owner = _walk(run, above)
    try:
        yield handle, name, owner
    finally:
        os.close(handle)


def _walk(run: Place, parts: list[str]) -> tuple[int, int]:
    """A descriptor of the folder at the end of `parts`, and the owner of the run."""
    handle = _open_folder(run, None, os.fspath(run))
    try:
        owner = os.fstat(handle).st_uid
        for place, name in enumerate(parts):
            shown = os.path.join(run, *parts[: place + 1])
            inner = _open_folder(name, handle, shown)
            os.close(handle)
            handle = inner
            if os.fstat(handle).st_uid != owner:
                raise _refused(shown, "does not belong to the owner of the run")
    except BaseException:
        os.close(handle)
        raise
    return handle, owner


def _open_folder(name: Place, above: int | None, shown: str) -> int:
    try:
        return os.open(name, _FOLDER, dir_fd=above)
    except OSError as problem:
        if problem.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        info = os.stat(name, dir_fd=above, follow_symlinks=False)
        raise _refused(shown, _LINK if stat.S_ISLNK(info.st_mode) else "is not a folder") from problem


def _parts(run: Place, path: Place) -> list[str]:
    root, text = os.fspath(run), os.fspath(path)
    if os.path.isabs(text):
        if text != root and not text.startswith(root.rstrip(os.sep) + os.sep):
            raise ValueError(f"{text}: is not below {root}")
        text = text[len(root) :]
    parts = [part for part in text.split(os.sep) if part]
    if any(part in (".", "..") for part in parts):
        raise ValueError(f"{text}: leads out of the run folder")
    return parts


def flaw(info: os.stat_result, owner: int, *, folder: bool = False) -> str:
    """Why this cannot be a file (or a folder) of a run whose folder `owner` has, in a few words; empty if it can."""
    if stat.S_ISLNK(info.st_mode):
        return _LINK
    if not (stat.S_ISDIR if folder else stat.S_ISREG)(info.st_mode):
        return "is not a folder" if folder else "is not a plain file"
    return "" if info.st_uid == owner else "does not belong to the owner of the run"


def _refuse_unless_file(info: os.stat_result, owner: int, path: Place, flags: int) -> None:
    reason = flaw(info, owner)
    if not reason and flags & (os.O_WRONLY | os.O_RDWR) and info.st_nlink > 1:
        reason = "has a second name outside or inside the run folder (a hard link), and both would be written"
    if reason:
        raise _refused(path, reason)


def _refused(path: Place, reason: str) -> UnsafeRunFile:
    return UnsafeRunFile(
        f"{visible(os.fspath(path))}: {reason}.", "Put a plain file or folder of the run's owner in its place."
    )


@contextmanager
def _missing_is_fine() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        return
