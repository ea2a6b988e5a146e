"""One reader of a run for all views of a kernel: opened by the first that looks, closed with the last.

A reader's epoch grows when the points that a view holds are no longer true: a resumed run took some back, or the whole
curve took the place of its end. A view of an older epoch gets its curves anew.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import ClassVar

from engine.run.index import Watch, open_view
from engine.run.store import RunFolder
from engine.run.view import RunView


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
