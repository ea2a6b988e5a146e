"""The run folder: its paths, its state file, its id; nothing else is the truth about a run.

It owns making a folder (by mkdir, so two windows never share one), finding one by name, and replacing `run.json`
atomically. It refuses names that are not slugs; what is refused inside a run folder is decided in `engine.run.inside`.
The supervisor alone writes `run.json` after the launch; readers tolerate a missing or damaged one.
"""

from __future__ import annotations

import errno
import json
import os
import re
import tempfile
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from engine import figures
from engine.errors import RunNotFound, WorkbenchError, as_argument, nearest, redact, visible
from engine.run import inside
from engine.run.disk import length_limit, storage_error
from engine.run.process import Identity, identity_from

STATES = ("queued", "starting", "running", "stopping", "finished", "stopped", "failed", "lost")
ENDED = frozenset({"finished", "stopped", "failed", "lost"})
ORIGIN = "comes_from"
"""What run.json says of the run for which this one was started: which, how it ended, what was changed."""
BALLAST_BYTES = 64 << 20
"""Room that a run at work holds and gives back piece by piece on a full disk, so that its last record can be written."""
_PIECES = 16
_MOST_JSON = 16 << 20
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
Result = TypeVar("Result")


def replace_file(path: Path, text: str) -> None:
    """Write `text` beside `path`, make it durable, and put it in place in one step. The file is private."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class _Place:
    """A file or folder of a run, by its name in the run's folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunFolder, _: type) -> Path:
        return run.path / self._name


class RunFolder:
    """One run on disk. Cheap to make; reads when asked."""

    config = _Place("config.yaml")
    json = _Place("run.json")
    lock = _Place("run.lock")
    events = _Place("events.jsonl")
    batches = _Place("batches.bin")
    in_flight = _Place("in_flight.bin")
    control = _Place("control")
    log = _Place("worker.log")
    checkpoints = _Place("checkpoints")
    samples = _Place("samples")
    index = _Place("index")
    ballast = _Place("checkpoints/.ballast")

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def id(self) -> str:
        return self.path.name

    def log_of(self, rank: int) -> Path:
        """What one rank printed; the first one's stands in the worker's log, with that of all."""
        return self.path / f"rank-{rank}.log" if rank else self.log

    def read_json(self) -> dict[str, Any]:
        """`run.json` as it stands; empty where it is missing or damaged."""
        return inside.read_json(self, self.json, _MOST_JSON)

    def update_json(self, **changes: Any) -> dict[str, Any]:
        """Replace `run.json` with these keys changed. For the launcher before, and the supervisor after, the launch."""
        values = {"id": self.id, **self.read_json(), **changes}
        text = json.dumps(values, indent=1) + "\n"
        self.with_ballast(lambda: inside.replace(self, self.json, text))
        return values

    def read_config(self) -> str:
        """The text of the run's own config. Raises WorkbenchError where it cannot be read."""
        try:
            return inside.read(self, self.config).decode("utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            reason = getattr(problem, "strerror", None) or "it is not UTF-8 text"
            raise WorkbenchError(f"run {visible(self.id)}: config.yaml cannot be read: {reason}.") from problem

    def flaw(self) -> str:
        """What stands in this folder that a run cannot have, in a sentence: the first of its files and folders that is a
        link, no plain file, or another person's. Empty where there is none."""
        try:
            owner = os.stat(self.path, follow_symlinks=False).st_uid
            for path in (self.config, self.json, self.lock, self.events, self.batches, self.in_flight, self.log):
                if inside.exists(self, path) and (reason := inside.flaw(inside.lstat(self, path), owner)):
                    return f"{visible(path.name)} {reason}."
            for path in (self.control, self.checkpoints, self.samples, self.index):
                if inside.exists(self, path):
                    reason = inside.flaw(inside.lstat(self, path), owner, folder=True)
                    if reason:
                        return f"{visible(path.name)} {reason}."
        except (OSError, WorkbenchError) as problem:
            return f"The folder cannot be read: {getattr(problem, 'strerror', None) or problem}."
        return ""

    def refuse_flaws(self) -> None:
        """Raises UnsafeRunFile where `flaw` finds something: before anything is written or started here."""
        if reason := self.flaw():
            raise inside.UnsafeRunFile(
                f"run {visible(self.id)}: {reason}",
                "Put a plain file or folder of the run's owner in its place; nothing was changed.",
            )

    def worker(self) -> Identity | None:
        return self._identity("worker", self.read_json())

    def supervisor(self) -> Identity | None:
        return self._identity("supervisor", self.read_json())

    @property
    def is_original(self) -> bool | None:
        """Whether this is the very folder in which its supervisor started the worker; None where run.json does not say."""
        folder = self.read_json().get("folder")
        try:
            return None if folder is None else folder == inside.identity(self)
        except OSError:
            return False

    def _identity(self, role: str, values: Mapping[str, Any]) -> Identity | None:
        # The processes that a copied run.json names work in another folder.
        if values.get("folder") is not None and self.is_original is False:
            return None
        return identity_from(
            {
                "pid": values.get(f"{role}_pid"),
                "start": values.get(f"{role}_start"),
                "boot": values.get("boot_id"),
                "host": values.get("host"),
            }
        )

    @property
    def state(self) -> str:
        """The state as the supervisor last wrote it; `engine.run.index` adds what the events say."""
        state = self.read_json().get("state")
        return state if state in STATES else "lost"

    def reserve_ballast(self) -> None:
        """Hold room for the last record of a run that begins to work. Raises StorageError where there is none.

        No file may be longer than the process's limit, and one that is reached is no matter of room.
        """
        limit = length_limit()
        size = BALLAST_BYTES if limit is None else min(BALLAST_BYTES, limit)
        try:
            handle = inside.open_file(self, self.ballast, os.O_WRONLY | os.O_CREAT)
            try:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(handle, 0, size)
                else:
                    os.pwrite(handle, b"\0" * size, 0)
            finally:
                os.close(handle)
        except OSError as problem:
            self.free_ballast()
            needed = f"{figures.size(BALLAST_BYTES)} needed to begin"
            raise storage_error(self.ballast, needed, problem) from problem

    def give_back_ballast(self) -> bool:
        """Free a piece of the reserved room on a full disk; tells whether there was any."""
        try:
            handle = inside.open_file(self, self.ballast, os.O_WRONLY)
        except (OSError, WorkbenchError):
            return False
        try:
            left = os.fstat(handle).st_size - max(1, BALLAST_BYTES // _PIECES)
            if left > 0:
                os.ftruncate(handle, left)
                return True
        except OSError:
            left = 0  # a file system that needs room to shorten a file; it needs none to remove it
        finally:
            os.close(handle)
        return self.free_ballast()

    def free_ballast(self) -> bool:
        """Free all of the reserved room; tells whether there was any."""
        try:
            inside.remove(self, self.ballast)
        except (OSError, WorkbenchError):
            return False
        return True

    def with_ballast(self, write: Callable[[], Result]) -> Result:
        """What `write` gives, which may use up the reserved room where the disk has no other."""
        while True:
            try:
                return write()
            except OSError as problem:
                if problem.errno not in NO_ROOM or not self.give_back_ballast():
                    raise


def slug(name: str) -> str:
    """A name fit for a folder: lower-case ASCII letters, digits and dashes, 40 at most."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")[:40].strip("-") or "run"


_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,39}-[0-9]{4,}")


def create(runs_dir: str | os.PathLike[str], config_text: str, info: Mapping[str, Any]) -> RunFolder:
    """Make a new run folder with its config and `run.json`; the id is `<slug of info["name"]>-NNNN`.

    `mkdir` decides who gets a number, so two launches at the same moment make two runs.
    Raises WorkbenchError where the folder cannot be written.
    """
    base = slug(str(info.get("name") or "run"))
    root = Path(runs_dir).absolute()
    try:
        root.mkdir(parents=True, exist_ok=True)
        path = _claim(root, base)
        run = RunFolder(path)
        for part in (run.control, run.checkpoints, run.samples, run.index):
            inside.make_folder(run, part)
        handle = inside.open_file(run, run.config, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(config_text)
            file.flush()
            os.fsync(file.fileno())
        run.update_json(**{"state": "starting", "created": time.time(), **info, "name": info.get("name") or "run"})
    except OSError as problem:
        raise WorkbenchError(
            f"{visible(str(root))}: no run can be made here: {problem.strerror or problem}.",
            "Choose another folder with --runs or the WORKBENCH_RUNS variable.",
        ) from problem
    return run


def _claim(root: Path, base: str) -> Path:
    taken = [int(name[len(base) + 1 :]) for name in os.listdir(root) if re.fullmatch(rf"{base}-[0-9]{{4,9}}", name)]
    number = max(taken, default=0) + 1
    while True:
        path = root / f"{base}-{number:04d}"
        try:
            path.mkdir(mode=0o700)
            return path
        except FileExistsError:
            number += 1


def is_run(path: Path) -> bool:
    """Whether the folder has the files of a run, whatever stands in their places: `RunFolder.flaw` tells that."""
    return os.path.lexists(path / "config.yaml") and (
        os.path.lexists(path / "run.json") or os.path.lexists(path / "events.jsonl")
    )


def runs_dir(explicit: str | os.PathLike[str] | None = None, config_dir: str | os.PathLike[str] | None = None) -> Path:
    """Where runs lie: `--runs`, else the config's `run.output_dir`, else $WORKBENCH_RUNS, else ./runs.

    The config that a run keeps says it of its own folder; a run that is started from it goes beside the first, not into it.
    """
    if not explicit and config_dir:
        within = Path(config_dir).expanduser().absolute().parent
        if is_run(within):
            return within.parent
    chosen = explicit or config_dir or os.environ.get("WORKBENCH_RUNS") or "runs"
    return Path(chosen).expanduser().absolute()


def called(run: RunFolder) -> str:
    """The run as an argument of a command: its id where that is found without more, else its folder."""
    return as_argument(visible(run.id if run.path.parent == runs_dir() else str(run.path)))


def runs_in(root: str | os.PathLike[str]) -> Iterator[RunFolder]:
    """Every run folder directly inside `root`, by name; symbolic links are not followed. Raises RunNotFound where it may not be
    read."""
    try:
        entries = sorted(os.scandir(root), key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return
    except PermissionError as problem:
        raise _unreadable(root, problem) from None
    for entry in entries:
        if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".") and is_run(Path(entry.path)):
            yield RunFolder(entry.path)


def _no_run(path: Path) -> RunNotFound:
    """Why a folder that somebody named is none of a run, and what it can be taken for."""
    shown = visible(str(path))[:200]
    if (path / "config.json").is_file() or (path / "adapter_config.json").is_file():
        return RunNotFound(
            f"{shown}: is a model's folder and no run's.", "`model.name` takes it as the start of a run."
        )
    if (path / "trainer_state.json").is_file() or any(path.glob("checkpoint-*")):
        hint = (
            "`workbench import` takes that tool's config over; `model.name` takes a checkpoint as the start of a run."
        )
        return RunNotFound(f"{shown}: holds checkpoints of another tool, and no run: run.json is not there.", hint)
    return RunNotFound(f"{shown}: is no run's folder: run.json is not there.", "`workbench runs` lists the runs.")


def find(name_or_path: str, runs_dir: str | os.PathLike[str]) -> RunFolder:
    """The run with this id inside `runs_dir`, or the run folder at this path.

    Raises RunNotFound, naming the nearest id.
    """
    try:
        return _find(name_or_path, Path(runs_dir))
    except PermissionError as problem:
        raise _unreadable(runs_dir, problem) from None


def _unreadable(root: str | os.PathLike[str], problem: OSError) -> RunNotFound:
    return RunNotFound(
        f"{visible(redact(os.fspath(root)))}: its runs cannot be read: {problem.strerror or problem}.",
        "See whose folder it is, or name another with --runs.",
    )


def _find(name_or_path: str, root: Path) -> RunFolder:
    if _ID.fullmatch(name_or_path) and is_run(root / name_or_path):
        return RunFolder(root / name_or_path)
    if "\0" not in name_or_path and len(name_or_path) < 4096:
        path = Path(name_or_path).expanduser()
        # A bare word that is also a folder of the working directory counts only if it is a run.
        if path.is_dir() and is_run(path.resolve()):
            return RunFolder(path.resolve())
        if path.is_dir() and os.sep in name_or_path:
            raise _no_run(path)
    known = [run.id for run in runs_in(root)]
    if name_or_path in known:  # a run's folder that somebody gave a name of his own
        return RunFolder(root / name_or_path)
    guess = nearest(name_or_path, known)
    hint = (
        f"Did you mean {guess}?"
        if guess
        else "`workbench runs` lists them; --runs, in a notebook runs=, names another folder."
    )
    raise RunNotFound(f"no run is called {visible(name_or_path)[:80]} in {visible(redact(str(root)))}.", hint)
