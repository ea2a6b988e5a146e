"""What a write that failed met: a full disk, a quota, a limit on the length of a file, a failing disk; in one sentence.

The system tells them apart by an error number. safetensors tells it inside its message, torch only that a file ended
early: then the limits are looked at and a few bytes are written to ask the system itself.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

from engine import figures
from engine.errors import WorkbenchError, visible

CAUSES = {
    errno.ENOSPC: "disk full",
    errno.EDQUOT: "disk quota",
    errno.EFBIG: "file size limit",
    errno.EIO: "disk error",
    errno.EROFS: "disk read-only",
}
"""The word for machines of each number that says why nothing more could be written."""
THEN_RESUME = "then resume the run."
"""How a way out goes on; who writes something else says what to do then."""
SCANT = 64 << 10
"""Free bytes below which a write that failed is taken to have found no room."""
_PROBE_BYTES = 1 << 20
_RUST = re.compile(r"\(os error (\d+)\)")
# How torch says that a file which it wrote is not whole: it keeps no number.
_TORCH = re.compile(r"inline_container|PytorchStreamWriter|unexpected pos|iostream error|file write failed")


class StorageError(WorkbenchError):
    """The disk took no more. `cause` is one of the words of `CAUSES`, or `write failed`."""

    def __init__(self, message: str, hint: str, cause: str) -> None:
        super().__init__(message, hint)
        self.cause = cause


def storage_error(
    path: str | os.PathLike[str], needed: str, problem: OSError, what: str = "", then: str = THEN_RESUME
) -> StorageError:
    """The sentence for a write to `path` that failed. `needed` says of how much; `what` is what it was for."""
    shown, number = visible(os.fspath(path)), problem.errno or 0
    needed = f"{what} found no room; {needed}" if what else needed
    free, no_inodes = _free(path)
    if number == errno.ENOSPC and no_inodes:
        sentence = f"the disk is full: {needed}, and it has no room for another file (its inodes are used up)."
        hint = f"Remove files that are not needed, {then}"
    elif number == errno.ENOSPC:
        sentence = f"the disk is full: {needed}, {free} free ({problem.strerror})."
        hint = f"Free some space, {then}"
    elif number == errno.EDQUOT:
        sentence = f"the disk quota is used up: {needed}; the disk itself has {free} free."
        hint = f"Remove files that count towards the quota or have it raised, {then}"
    elif number == errno.EFBIG:
        sentence = f"{_length_limit()}: {needed}."
        hint = f"Raise the limit (`ulimit -f unlimited`) or choose another file system, {then}"
    elif number == errno.EIO:
        sentence = f"the disk reports an input/output error: {needed}."
        hint = f"The system's log (`dmesg`) tells whether the disk or the network share fails; mend it, {then}"
    elif number == errno.EROFS:
        sentence = f"the file system is read-only now: {needed}."
        hint = f"Mount it writable again (`dmesg` tells why it changed), {then}"
    else:
        sentence = f"writing failed: {problem.strerror or problem}; {needed}."
        hint = f"Look at the disk, {then}"
    return StorageError(f"{shown}: {sentence}", hint, CAUSES.get(number, "write failed"))


def of_library(folder: Path, problem: BaseException) -> OSError | None:
    """What the system says about a library's failure to write into `folder`; None for a failure of another kind."""
    errors = [error for error in _chain(problem)]
    for error in errors:
        number = getattr(error, "errno", None)
        if number in CAUSES:
            return OSError(number, os.strerror(number))
        text = str(error)
        for number in [int(code) for code in _RUST.findall(text)] + list(CAUSES):
            if number in CAUSES and (f"(os error {number})" in text or os.strerror(number) in text):
                return OSError(number, os.strerror(number))
    if number := _full_or_limited(folder):
        return OSError(number, os.strerror(number))
    if any(_TORCH.search(str(error)) for error in errors):
        return _probed(folder) or OSError(0, visible(str(problem).strip().split("\n")[0])[:300])
    return None


def named_by(problem: BaseException, folder: Path) -> str:
    """The file below `folder` that a failure names, by the path in its number's error or in its text; else nothing."""
    below = re.compile(re.escape(f"{folder}{os.sep}") + r"([\w./-]*\w)")
    for error in _chain(problem):
        for text in (str(getattr(error, "filename", None) or ""), str(error)):
            if match := below.search(text):
                return match[1]
    return ""


def guarded(path: str | os.PathLike[str], needed: Callable[[], str], work: Callable[[], None]) -> None:
    """Do `work`, and say in one sentence what a write of it to `path` met."""
    try:
        work()
    except OSError as problem:
        if problem.errno not in CAUSES:
            raise
        raise storage_error(path, needed(), problem) from problem


def _chain(problem: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while problem is not None and id(problem) not in seen:
        seen.add(id(problem))
        yield problem
        problem = problem.__cause__ or problem.__context__


def _full_or_limited(folder: Path) -> int:
    """The number of what plainly stands in the way of a longer file in `folder`; 0 where nothing does."""
    limit = length_limit()
    sizes = [path.lstat().st_size for path in folder.rglob("*")]
    if limit is not None and sizes and max(sizes) > limit - SCANT:
        return errno.EFBIG
    space = os.statvfs(folder)
    return errno.ENOSPC if space.f_bavail * space.f_frsize < SCANT else 0


def _probed(folder: Path) -> OSError | None:
    """What a write meets now, if it meets anything."""
    probe = folder / f".probe-{secrets.token_hex(4)}"
    try:
        handle = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            written = os.write(handle, b"\0" * _PROBE_BYTES)
            os.write(handle, b"\0" * (_PROBE_BYTES - written))
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as problem:
        return problem
    finally:
        probe.unlink(missing_ok=True)
    return None


def length_limit() -> int | None:
    """Bytes that no file of this process may grow beyond; None without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _length_limit() -> str:
    limit = length_limit()
    if limit is None:
        return "this file system takes no file that long"
    return f"a file may not grow beyond {figures.size(limit)} here (RLIMIT_FSIZE)"


def _free(path: str | os.PathLike[str]) -> tuple[str, bool]:
    """(free bytes in words, whether no file can be added) where `path` is or would be."""
    place = Path(path)
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        space = os.statvfs(place)
    except OSError:
        return "unknown", False
    inodes = getattr(space, "f_files", 0)
    return figures.size(space.f_bavail * space.f_frsize), bool(inodes) and not getattr(space, "f_favail", 1)
