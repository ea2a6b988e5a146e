"""Checkpoints that are whole or absent: write into `checkpoint-N.tmp`, commit, and only then does it have its name.

`commit` makes every file durable, lists sizes and hashes in COMMIT.json, makes that durable, and renames the folder.
A checkpoint is valid if COMMIT.json parses and every file has its size (and hash, where asked). Resume takes the newest
valid one and says which it skipped and why. A checkpoint is deleted only after a newer one is valid, two always stay.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from engine import figures
from engine.errors import WorkbenchError, redact, visible
from engine.run import inside
from engine.run.disk import CAUSES, StorageError, guarded, length_limit, named_by, of_library, storage_error
from engine.run.inside import UnsafeRunFile
from engine.run.lock import RunLock
from engine.run.store import ENDED, RunFolder

COMMIT = "COMMIT.json"
KEEP_AT_LEAST = 2
NEEDED = 1.1
"""Room for another checkpoint, in sizes of the last one."""
LARGE, AT_ONCE = 256 << 20, 4
"""Bytes of a checkpoint from which so many of its files are hashed side by side."""
# What TRL and transformers write beside a checkpoint and must not stay: this one pickles the hub token in clear.
UNWANTED = frozenset({"training_args.bin"})
_NAME = re.compile(r"checkpoint-(0|[1-9][0-9]{0,17})")


def step_of(path: Path) -> int | None:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def begin(folder: RunFolder, step: int) -> Path:
    """An empty `checkpoint-N.tmp` to write into. Raises WorkbenchError if the disk has no room for another checkpoint."""
    tmp = folder.checkpoints / f"checkpoint-{step}.tmp"
    needed = _last_size(folder)
    if needed:
        _need_room(tmp, int(NEEDED * needed))

    def make() -> None:
        if inside.exists(folder, tmp):
            discard(tmp)
        inside.make_folder(folder, tmp)

    guarded(tmp, lambda: _need(needed), make)
    return tmp


def commit(tmp: Path, info: Mapping[str, Any]) -> Path:
    """Make `checkpoint-N.tmp` durable and give it its name; returns the new path.

    `info` goes into COMMIT.json (step, config hash, versions, RNG kinds, data cursor, ...). A checkpoint of that name
    from an earlier try is replaced. Raises StorageError, with nothing left, where the disk takes no more or fails, and
    WorkbenchError on links and special files inside.
    """
    final = tmp.with_suffix("")
    step = step_of(final)
    if tmp.suffix != ".tmp" or step is None:
        raise ValueError(f"{tmp}: not a name made by begin()")
    try:
        _seal_all(tmp, {"v": 1, "step": step, **info})
        if inside.exists(_run_of(tmp), final):
            discard(final)
        inside.rename(_run_of(tmp), tmp, final)
        inside.sync(_run_of(tmp), final.parent)
    except OSError as problem:
        if problem.errno not in CAUSES or not inside.exists(_run_of(tmp), tmp):
            raise
        raise _failed(tmp, problem, named_by(problem, tmp)) from problem
    return final


def _seal_all(tmp: Path, head: dict[str, Any]) -> None:
    """Every file and folder durable, and COMMIT.json, which lists them."""
    from concurrent.futures import ThreadPoolExecutor  # no window waits for it

    run = _run_of(tmp)
    found = {name: size for name, size in _files(tmp) if name != COMMIT}
    # Reading and hashing let go of the interpreter; a hash is one core's work, and a model of 8B with its states takes a minute.
    large = sum(found.values()) > LARGE
    with ThreadPoolExecutor(AT_ONCE, "seal-file") if large else contextlib.nullcontext() as pool:
        sealed = (pool.map if pool else map)(lambda name: _seal(run, tmp / name), found)
        files = dict(zip(found, sealed, strict=True))
    handle = inside.open_file(run, tmp / COMMIT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(json.dumps({**head, "files": files}, indent=1))
        file.flush()
        os.fsync(file.fileno())
    for name, info in reversed(list(inside.entries(run, tmp))):
        if stat.S_ISDIR(info.st_mode):
            inside.sync(run, tmp / name)
    inside.sync(run, tmp)


@contextlib.contextmanager
def abandoned_on_error(tmp: Path) -> Iterator[None]:
    """Removes `checkpoint-N.tmp` where the block that writes it fails, for whatever reason."""
    try:
        yield
    except BaseException:
        # A disk that fails may refuse this as well; the next worker collects what stays.
        with contextlib.suppress(OSError, UnsafeRunFile):
            if inside.exists(_run_of(tmp), tmp):
                discard(tmp)
        raise


def without_room(tmp: Path, problem: Exception, part: str = "") -> WorkbenchError | None:
    """The one sentence for writing into `checkpoint-N.tmp` where the disk took no more or failed, its half removed; None
    for any other failure. `part` is the file that was to be written, as far as the caller knows.

    Libraries that write the files say it in words of their own, or only that a file ended early.
    """
    full = of_library(tmp, problem)
    return None if full is None else _failed(tmp, full, named_by(problem, tmp) or part)


def _failed(tmp: Path, problem: OSError, part: str = "") -> StorageError:
    """The sentence for a checkpoint that could not be written, which names the file it came to; its half is removed."""
    run = RunFolder(_run_of(tmp))
    written = {name: info for name, info in inside.entries(run, tmp) if not stat.S_ISDIR(info.st_mode)}
    newest = max(written, key=lambda name: written[name].st_mtime_ns, default="")
    # A library that takes its half file away leaves another one as the newest.
    name = part or newest
    size = written[name].st_size if name in written else 0
    known = _newest_commit(run)
    one = problem.errno == errno.EFBIG
    length = known["files"].get(name, {}).get("size") if known and one else _last_size(run)
    so_far = max(size, length_limit() or 0) if one else size_of(tmp)
    # A disk that fails may refuse this as well; the next worker collects what stays.
    with contextlib.suppress(OSError):
        inside.remove(run, tmp)
    return storage_error(tmp / name, _need(length, so_far), problem, tmp.stem)


def _need(known: int | None, written: int = 0) -> str:
    """How much room is needed, as far as earlier checkpoints tell."""
    if known and known > written:
        return f"{figures.size(known)} needed"
    return f"more than {figures.size(written)} needed" if written else "how much it needs is not known yet"


def _newest_commit(folder: RunFolder) -> dict[str, Any] | None:
    return next((info for path in newest_first(folder) if (info := read_commit(path))), None)


def _last_size(folder: RunFolder) -> int:
    """Bytes of the newest checkpoint by its COMMIT.json; 0 where there is none."""
    info = _newest_commit(folder)
    return sum(entry["size"] for entry in info["files"].values()) if info else 0


def _run_of(path: Path) -> Path:
    """The run's folder of a checkpoint's path."""
    return path.parent.parent


def _files(tmp: Path) -> Iterator[tuple[str, int]]:
    for name, info in list(inside.entries(_run_of(tmp), tmp)):
        if name.rpartition("/")[2] in UNWANTED:
            inside.remove(_run_of(tmp), tmp / name)
        elif stat.S_ISREG(info.st_mode):
            yield name, info.st_size
        elif not stat.S_ISDIR(info.st_mode):
            raise WorkbenchError(f"{visible(str(tmp / name))}: is not a plain file; a checkpoint holds only those.")


def _seal(run: Path, path: Path) -> dict[str, Any]:
    """Size and hash of one file, made durable."""
    handle = inside.open_file(run, path)
    try:
        with contextlib.suppress(OSError):  # some file systems keep no times
            os.utime(handle)  # a supervisor that was asked to stop sees that the save gets on
        digest, size = _hash(handle)
        os.fsync(handle)
    finally:
        os.close(handle)
    return {"size": size, "sha256": digest}


def _hash(handle: int, between: Callable[[], None] | None = None) -> tuple[str, int]:
    digest, size = hashlib.sha256(), 0
    while block := os.read(handle, 1 << 20):
        digest.update(block)
        size += len(block)
        if between is not None:
            between()
    return digest.hexdigest(), size


def read_commit(path: Path) -> dict[str, Any] | None:
    """COMMIT.json of a checkpoint, if it is there and whole."""
    try:
        commit = json.loads(inside.read(_run_of(path), path / COMMIT))
    except (OSError, ValueError, RecursionError, UnsafeRunFile):
        return None
    if not isinstance(commit, dict) or not isinstance(commit.get("files"), dict):
        return None
    for name, entry in commit["files"].items():
        if (
            not isinstance(entry, dict)
            or type(entry.get("size")) is not int
            or not isinstance(entry.get("sha256"), str)
        ):
            return None
        if name.startswith("/") or {".", ".."} & set(name.split("/")) or visible(name) != name:
            return None
    return commit


def problem_with(path: Path, *, hashes: bool = False, between: Callable[[], None] | None = None) -> str:
    """Why this checkpoint cannot be used, in a few words; empty if it is whole. `between` is called again and again while files
    are read for their hashes."""
    try:
        return _problem_with(path, hashes, between)
    except UnsafeRunFile as problem:
        return problem.message
    except OSError as problem:
        return f"cannot be read: {problem.strerror or problem}"


def _problem_with(path: Path, hashes: bool, between: Callable[[], None] | None) -> str:
    run = _run_of(path)
    if not inside.exists(run, path):
        return "is not there"
    if not stat.S_ISDIR(inside.lstat(run, path).st_mode):
        return "is not a folder"
    info = read_commit(path)
    if info is None:
        return f"{COMMIT} is missing or damaged"
    for name, entry in info["files"].items():
        try:
            handle = inside.open_file(run, path / name)
        except FileNotFoundError:
            return f"{visible(name)} is missing"
        try:
            size = os.fstat(handle).st_size
            if size != entry["size"]:
                return f"{visible(name)} has {size} bytes instead of {entry['size']}"
            if hashes and _hash(handle, between)[0] != entry["sha256"]:
                return f"{visible(name)} has changed since it was saved"
        finally:
            os.close(handle)
    known = {*info["files"], COMMIT}
    for name, entry_info in inside.entries(run, path):
        if not stat.S_ISDIR(entry_info.st_mode) and name not in known and not name.rpartition("/")[2].startswith("."):
            return f"{visible(name)} was not there when it was saved"
    return ""


def has_changed(path: Path, name: str) -> bool:
    """Whether a file of a checkpoint is not the one that was saved. False of a folder that does not say what was."""
    entry = (read_commit(path) or {"files": {}})["files"].get(name)
    if entry is None:
        return False
    with (path / name).open("rb") as file:
        return _hash(file.fileno())[0] != str(entry["sha256"])


def is_valid(path: Path, *, hashes: bool = False) -> bool:
    return not problem_with(path, hashes=hashes)


def newest_first(folder: RunFolder) -> list[Path]:
    """The folders with a checkpoint's name, whole or not."""
    try:
        checkpoints = [
            path
            for name in inside.names(folder, folder.checkpoints)
            if step_of(path := folder.checkpoints / name) is not None
        ]
    except FileNotFoundError:
        return []
    return sorted(checkpoints, key=lambda path: step_of(path) or 0, reverse=True)


def newest_valid(
    folder: RunFolder, *, hashes: bool = True, between: Callable[[], None] | None = None
) -> tuple[Path | None, list[tuple[Path, str]]]:
    """The newest whole checkpoint, and those newer than it with the reason why they were skipped."""
    skipped: list[tuple[Path, str]] = []
    for path in newest_first(folder):
        reason = problem_with(path, hashes=hashes, between=between)
        if not reason:
            return path, skipped
        skipped.append((path, reason))
    return None, skipped


def to_go_on_from(
    folder: RunFolder, between: Callable[[], None] | None = None
) -> tuple[Path | None, list[tuple[Path, str]]]:
    """As `newest_valid` for a run whose worker is gone, what that left half done collected as the next one will."""
    with RunLock(folder).acquire_soon():
        collect(folder, between)
    return newest_valid(folder, between=between)


def prune(folder: RunFolder, keep: int, best: int | None = None) -> list[Path]:
    """Delete all but the `keep` newest valid checkpoints (never fewer than two) and that of the step `best`, and return
    what went.

    Invalid ones older than the newest valid one go too. Nothing goes while no checkpoint is valid.
    """
    gone = to_delete(folder, max(keep, KEEP_AT_LEAST), best)
    for path in gone:
        discard(path)
    return gone


def to_delete(folder: RunFolder, keep: int, best: int | None = None, *, hashes: bool = False) -> list[Path]:
    """What `prune` would delete, the newest first, with `keep` as it stands."""
    valid, gone = 0, []
    for path in newest_first(folder):
        # What goes anyway need not be read whole.
        if is_valid(path, hashes=hashes and valid < keep):
            valid += 1
            if valid > keep and step_of(path) != best:
                gone.append(path)
        elif valid > 0:
            gone.append(path)
    return gone


def collect(folder: RunFolder, between: Callable[[], None] | None = None) -> list[Path]:
    """Remove what an earlier worker left half done. Call with the run's lock held, before the first save.

    A `.tmp` whose COMMIT.json is whole was complete (its worker died just before the rename): it gets its name.
    """
    gone = []
    names = inside.names(folder, folder.checkpoints) if inside.exists(folder, folder.checkpoints) else []
    for path in [folder.checkpoints / name for name in names]:
        if path.name.startswith(".trash-"):
            inside.remove(folder, path)
            gone.append(path)
        elif path.suffix == ".tmp" and step_of(path.with_suffix("")) is not None:
            final = path.with_suffix("")
            if not inside.exists(folder, final) and not problem_with(path, hashes=True, between=between):
                inside.rename(folder, path, final)
                inside.sync(folder, folder.checkpoints)
            else:
                discard(path)
                gone.append(path)
    return gone


def way_to_one(folder: RunFolder) -> str:
    """What gives a run without a whole checkpoint one."""
    name = visible(folder.id)
    if folder.state not in ENDED:
        return f"`workbench checkpoint {name}` asks it for one."
    if folder.state == "finished":
        return f"It is finished: `workbench train {visible(redact(str(folder.config)))}` trains it again, as a new run."
    return f"`workbench resume {name}` goes on with it."


def size_of(path: Path) -> int:
    """Bytes of all plain files below `path`, a run's folder or a checkpoint's; 0 where it cannot be read."""
    try:
        return sum(info.st_size for _, info in inside.entries(path) if stat.S_ISREG(info.st_mode))
    except (OSError, UnsafeRunFile):
        return 0


def discard(path: Path) -> None:
    """Take the name away first, in one step; a half-deleted folder never looks like a checkpoint."""
    run, trash = _run_of(path), path.with_name(f".trash-{path.name}-{secrets.token_hex(4)}")
    inside.rename(run, path, trash)
    inside.sync(run, path.parent)
    inside.remove(run, trash)


def _need_room(tmp: Path, needed: int) -> None:
    space = os.statvfs(_run_of(tmp))
    if space.f_bavail * space.f_frsize < needed:
        raise storage_error(
            tmp, f"{figures.size(needed)} needed", OSError(errno.ENOSPC, "no room for another checkpoint")
        )
