"""The run folder: its paths, its state file, its id; nothing else is the truth about a run.

It owns making a folder (by mkdir, so two windows never share one), finding one by name, and replacing `run.json`
atomically. It refuses symbolic links inside a run folder and names that are not slugs. The supervisor alone writes
`run.json` after the launch; readers tolerate a missing or damaged one.
"""

from __future__ import annotations

import errno
import json
import os
import re
import tempfile
import time
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from engine.errors import RunNotFound, WorkbenchError, nearest, visible
from engine.run.process import Identity, identity_from

STATES = ("queued", "starting", "running", "stopping", "finished", "stopped", "failed", "lost")
ENDED = frozenset({"finished", "stopped", "failed", "lost"})
# Room that is given back when the disk is full, so that the last record of a run can still be written.
BALLAST_BYTES = 1 << 20


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


def open_inside(path: Path, flags: int, mode: int = 0o600) -> int:
    """Open a file of a run folder: close-on-exec, and never through a symbolic link."""
    try:
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    except OSError as problem:
        if path.is_symlink():
            raise WorkbenchError(
                f"{visible(str(path))}: is a symbolic link; a run folder holds none. Remove it."
            ) from problem
        raise


class RunFolder:
    """One run on disk. Cheap to make; reads when asked."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def json(self) -> Path:
        return self.path / "run.json"

    @property
    def lock(self) -> Path:
        return self.path / "run.lock"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def batches(self) -> Path:
        return self.path / "batches.bin"

    @property
    def control(self) -> Path:
        return self.path / "control"

    @property
    def log(self) -> Path:
        return self.path / "worker.log"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    @property
    def index(self) -> Path:
        return self.path / "index"

    @property
    def ballast(self) -> Path:
        return self.checkpoints / ".ballast"

    def read_json(self) -> dict[str, Any]:
        """`run.json` as it stands; empty where it is missing or damaged."""
        try:
            found = json.loads(self.json.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def update_json(self, **changes: Any) -> dict[str, Any]:
        """Replace `run.json` with these keys changed. For the launcher before, and the supervisor after, the launch."""
        values = {"id": self.id, **self.read_json(), **changes}
        text = json.dumps(values, indent=1) + "\n"
        try:
            replace_file(self.json, text)
        except OSError as problem:
            if problem.errno not in (errno.ENOSPC, errno.EDQUOT) or not self.give_back_ballast():
                raise
            replace_file(self.json, text)
        return values

    def worker(self) -> Identity | None:
        return self._identity("worker", self.read_json())

    def supervisor(self) -> Identity | None:
        return self._identity("supervisor", self.read_json())

    @staticmethod
    def _identity(role: str, values: Mapping[str, Any]) -> Identity | None:
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

    def give_back_ballast(self) -> bool:
        """Free the reserved room on a full disk; tells whether there was any."""
        try:
            self.ballast.unlink()
        except OSError:
            return False
        return True


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
            part.mkdir(mode=0o700)
        handle = open_inside(run.config, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(config_text)
            file.flush()
            os.fsync(file.fileno())
        _fill_ballast(run)
        run.update_json(state="starting", created=time.time(), **{**info, "name": info.get("name") or "run"})
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


def _fill_ballast(run: RunFolder) -> None:
    handle = open_inside(run.ballast, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, BALLAST_BYTES)
        else:
            os.write(handle, b"\0" * BALLAST_BYTES)
    finally:
        os.close(handle)


def is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file() and ((path / "run.json").is_file() or (path / "events.jsonl").is_file())


def runs_dir(explicit: str | os.PathLike[str] | None = None, config_dir: str | os.PathLike[str] | None = None) -> Path:
    """Where runs lie: `--runs`, else the config's `run.output_dir`, else $WORKBENCH_RUNS, else ./runs."""
    chosen = explicit or config_dir or os.environ.get("WORKBENCH_RUNS") or "runs"
    return Path(chosen).expanduser().absolute()


def runs_in(root: str | os.PathLike[str]) -> Iterator[RunFolder]:
    """Every run folder directly inside `root`, by name; symbolic links are not followed."""
    try:
        entries = sorted(os.scandir(root), key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".") and is_run(Path(entry.path)):
            yield RunFolder(entry.path)


def find(name_or_path: str, runs_dir: str | os.PathLike[str]) -> RunFolder:
    """The run with this id inside `runs_dir`, or the run folder at this path.

    Raises RunNotFound, naming the nearest id.
    """
    root = Path(runs_dir)
    if _ID.fullmatch(name_or_path) and is_run(root / name_or_path):
        return RunFolder(root / name_or_path)
    if "\0" not in name_or_path and len(name_or_path) < 4096:
        path = Path(name_or_path).expanduser()
        # A bare word that is also a folder of the working directory counts only if it is a run.
        if path.is_dir() and is_run(path.resolve()):
            return RunFolder(path.resolve())
    known = [run.id for run in runs_in(root)]
    guess = nearest(name_or_path, known)
    hint = f"Did you mean {guess}?" if guess else "`workbench runs` lists them; --runs names another folder."
    raise RunNotFound(f"no run is called {visible(name_or_path)[:80]} in {visible(str(root))}.", hint)
