"""An event writer that keeps the numbers of a step off the step: a thread makes and writes them, a tenth of a second late.

`defer` costs its caller an append, no wake-up; what is expensive (encoding, files, counters of the machine, and work
given to `beside`) runs ten times a second while the step waits for its matrices. Order holds: `write` first writes all
that came before it, so a checkpoint is never told before the steps it holds, and whoever dies by SIGKILL loses the
numbers of a tenth of a second, not an event that promised something.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from engine.run.events import FINAL, EventWriter
from engine.run.store import RunFolder

LATE_SECONDS = 0.1
Make = Callable[[], "dict[str, Any] | None"]


class AsyncWriter(EventWriter):
    """`defer(kind, make)` beside `write(kind, ...)`. A problem of the thread is raised by the next call of either."""

    def __init__(self, folder: RunFolder, segment: int | None = None) -> None:
        super().__init__(folder, segment)
        self._queue: deque[tuple[float, str, Make]] = deque()
        self._closing = threading.Event()
        self._beside: list[Callable[[], None]] = []
        self._writing = threading.RLock()
        self._problem: Exception | None = None
        self._thread: threading.Thread | None = None

    def defer(self, kind: str, make: Make) -> None:
        """An event of this moment whose payload `make` gives soon, on another thread; None means that there is none."""
        if self._problem is not None:
            self._raise()
        self._queue.append((time.monotonic(), kind, make))
        if self._thread is None:
            self._start()

    def beside(self, work: Callable[[], None]) -> None:
        """Have `work` done on the writer's thread ten times a second from now on. A problem ends it and is raised by the
        next call of `defer` or `write`."""
        self._beside.append(work)
        if self._thread is None:
            self._start()

    def write(self, kind: str, **payload: Any) -> int:
        with self._writing:
            self._drain()
            # The last word is said whatever became of the numbers before it.
            if self._problem is not None and kind not in FINAL:
                self._raise()
            return super().write(kind, **payload)

    def close(self) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        with self._writing:
            if self._handle >= 0:
                self._drain()
            super().close()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._work, name="late-events", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._closing.wait(LATE_SECONDS):
            with self._writing:
                self._drain()
            try:
                for work in self._beside:
                    work()
            except Exception as problem:  # noqa: BLE001 - as in `_drain`
                self._problem = problem
                self._beside.clear()

    def _drain(self) -> None:
        """Write what waits, in order. The first problem is kept for the training's own thread and ends the queue."""
        try:
            while self._queue:
                moment, kind, make = self._queue.popleft()
                payload = make()
                if payload is not None:
                    self._write_at(moment, kind, payload)
        except Exception as problem:  # noqa: BLE001 - the thread's boundary: it is raised where somebody listens
            self._problem = problem
            self._queue.clear()

    def _raise(self) -> None:
        problem, self._problem = self._problem, None
        assert problem is not None
        raise problem
