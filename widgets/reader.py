"""The runs that a view may look at by their names, and one reader of a run for all views of a kernel, opened by the first
that looks and closed with the last.

A reader's epoch grows when the points that a view holds are no longer true: a resumed run took some back, or the whole
curve took the place of its end. A view of an older epoch gets its curves anew.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from engine.errors import RunNotFound, visible
from engine.run.ending import End, end_of
from engine.run.evaluations import FILE
from engine.run.index import Watch, open_view
from engine.run.store import RunFolder, is_run
from engine.run.view import RunView
from widgets import telling

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,120}")
GROUPS_SECONDS = 2.0
Seen = TypeVar("Seen")


class Reader:
    """The one reader of a run in this kernel, shared by all views and closed with the last of them."""

    _open: ClassVar[dict[Path, Reader]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.lock = threading.RLock()
        self.users = 0
        self.watch: Watch = open_view(folder)
        self.epoch = 0
        self._told = self._standing()
        self._end: tuple[object, End] = (None, End())
        self._groups: tuple[float, list[dict[str, Any]]] = (-math.inf, [])

    @classmethod
    def of(cls, folder: RunFolder) -> Reader:
        with cls._lock:
            reader = cls._open.get(folder.path)
            if reader is None:
                reader = cls._open[folder.path] = cls(folder)
            reader.users += 1
            return reader

    def leave(self) -> None:
        with self._lock:
            self.users -= 1
            if self.users == 0:
                self._open.pop(self.folder.path, None)
                self.watch.close()

    def _standing(self) -> tuple[int, int]:
        """What must stay the same for the points that a view holds to be true."""
        view = self.watch.view
        return id(view), len(view.superseded)

    def poll(self) -> RunView:
        self.watch.poll()
        now = self._standing()
        if now != self._told:
            self.epoch += 1
            self._told = now
        return self.watch.view

    def end(self, view: RunView) -> End:
        """What a run that is over leaves; read again where its checkpoints or its measurements have changed."""
        if not view.over:
            return End()
        try:
            measured = (self.folder.path / FILE).stat().st_size
        except OSError:
            measured = 0
        mark = (view.state, view.segment, list(view.committed), str(view.best), measured)
        if self._end[0] != mark:
            self._end = (mark, end_of(view, self.folder, self.folder.id))
        return self._end[1]

    def groups(self, view: RunView) -> list[dict[str, Any]]:
        """The newest groups of completions: each step may bring many, so they are told anew only now and then."""
        at, groups = self._groups
        if view.over or time.monotonic() - at > GROUPS_SECONDS:
            groups = telling.rollouts(view)
            self._groups = (time.monotonic(), groups)
        return groups


class Runs:
    """The runs of one folder, and those that were given, by what each is called; several parts of a view share them."""

    def __init__(self, runs_dir: Callable[[], Path], given: Mapping[str, RunFolder] | None = None) -> None:
        self._runs_dir = runs_dir
        self.given = dict(given or {})
        self._readers: dict[str, Reader] = {}
        self._lock = threading.Lock()

    def folder(self, run: str) -> RunFolder:
        """A run by its plain name: one that was given, or one of the folder. No path that was not given comes in by message."""
        if run in self.given:
            return self.given[run]
        if not _RUN_ID.fullmatch(run) or not is_run(self._runs_dir() / run):
            raise RunNotFound(f"no run is called {visible(run)[:80]} in {visible(str(self._runs_dir()))}.")
        return RunFolder(self._runs_dir() / run)

    def reader(self, run: str) -> Reader:
        with self._lock:
            if run not in self._readers:
                self._readers[run] = Reader.of(self.folder(run))
            return self._readers[run]

    def give(self, run: RunFolder) -> None:
        """A run that was started here can be watched from now on by its name, wherever it lies."""
        self.given.setdefault(run.id, run)

    def seen(self, run: str, tell: Callable[[RunView], Seen]) -> Seen:
        """What `tell` makes of a run as it stands now, while no other thread folds its events."""
        reader = self.reader(run)
        with reader.lock:
            return tell(reader.poll())

    def read_completely(self, run: str) -> None:
        """Waits until the whole curves of a run are read, and not its end alone."""
        reader = self.reader(run)
        with reader.lock:
            reader.watch.read_completely()

    def seen_together(self, runs: Sequence[str], tell: Callable[[list[RunView]], Seen]) -> Seen:
        """`seen` for several runs at once; their locks are always taken in one order."""
        readers = [self.reader(run) for run in runs]
        with ExitStack() as stack:
            for reader in sorted(set(readers), key=id):
                stack.enter_context(reader.lock)
            return tell([reader.poll() for reader in readers])

    def close(self) -> None:
        """This view looks at none of them any more."""
        for reader in self._readers.values():
            reader.leave()
        self._readers.clear()
