"""One inspector for all widgets of a kernel: it holds torch, so a cell that is run again must not start another.

Started by the first question, ended when the last widget that may ask is closed, or with the kernel.
"""

from __future__ import annotations

import threading
from typing import Any

from engine.client import Inspector, Progress, Ticket
from engine.errors import WorkbenchError

_lock = threading.Lock()
_shared: Inspector | None = None
_users = 0


class Asker:
    """A widget's right to ask. The inspector itself lives as long as any asker is open."""

    def __init__(self) -> None:
        global _users
        self._open = True
        with _lock:
            _users += 1

    def ask(self, do: str, *, on_progress: Progress | None = None, **params: Any) -> Ticket:
        global _shared
        with _lock:
            if not self._open:
                raise WorkbenchError("this view is closed; run its cell again.")
            if _shared is None:
                _shared = Inspector()
            return _shared.ask(do, on_progress=on_progress, **params)

    @property
    def pid(self) -> int | None:
        return _shared.pid if _shared is not None else None

    def close(self) -> None:
        global _shared, _users
        with _lock:
            if not self._open:
                return
            self._open = False
            _users -= 1
            last, _shared = (_shared, None) if _users == 0 else (None, _shared)
        if last is not None:
            last.close()
