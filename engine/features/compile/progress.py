"""What is told while layers are compiled: a phase with its seconds so far, and what the wait was, kept for the next run.

The compiler works in the middle of a batch: of the first one, and of a later one that comes in a form of its own (one row,
held out). A person who watches sees a run that stands still; so the phase says what it does and why that is earned, and a
count of its seconds goes on. From the second batch on the seconds from batch to batch are measured, with plain layers and
with compiled ones, by the clock that everything in between is in.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator

from engine.compat.compiler_events import watch_compiler
from engine.facts import compiler_waits
from engine.facts.compiler_waits import Measured
from engine.features.built import Events

WHAT = "compiling layers"
TICK = 1.0
PACES = 9
"""Times from batch to batch of which the median is taken."""


class CompileProgress:
    """Tells the events of a run while the compiler is at work; without events nothing is told."""

    def __init__(self, events: Events | None, why: str, expected: float | None = None) -> None:
        self._events, self._why, self._expected = events, why, expected
        self._stop: threading.Event | None = None
        self._thread: threading.Thread | None = None
        self._inside = False

    def watch(self) -> Callable[[], None]:
        """Begins to listen to the compiler; returns the undo."""
        return watch_compiler(self._begin, self._done)

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Inside is one batch: what the compiler begins in it is told until its end, since kernels are tried as they run."""
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
            self._end()

    def _begin(self) -> None:
        if self._stop is not None or self._events is None:
            return
        self._events.write("phase", name=f"Compiling layers: {self._why}")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._tick, args=(self._stop, self._events), daemon=True)
        self._thread.start()

    def _tick(self, stop: threading.Event, events: Events) -> None:
        begun, total = time.monotonic(), round(self._expected or 0)
        while not stop.wait(TICK):
            done = round(time.monotonic() - begun)
            events.write("progress", what=WHAT, done=done, total=total if done <= total else 0, unit="seconds")

    def _done(self) -> None:
        if not self._inside:
            self._end()

    def _end(self) -> None:
        if self._stop is None or self._thread is None or self._events is None:
            return
        self._stop.set()
        self._thread.join()
        self._stop = self._thread = None
        self._events.write("phase", name="Training")


class Paces:
    """The seconds from batch to batch, and the wait of the first compiled one, kept under `name` once they are known."""

    def __init__(self, name: str | None) -> None:
        self._name = name
        self._last: tuple[bool, float] | None = None
        self._seen: dict[bool, list[float]] = {False: [], True: []}
        self._first: float | None = None

    def batch(self, compiled: bool) -> None:
        """A batch begins, with compiled layers or plain ones."""
        now = time.monotonic()
        if self._last is not None and self._last[0] is compiled and len(self._seen[compiled]) < PACES:
            self._seen[compiled].append(now - self._last[1])
            if len(self._seen[compiled]) == PACES:
                self._keep(compiled)
        self._last = compiled, now

    def waited(self, seconds: float) -> None:
        """The first compiled batch took so long."""
        self._first = seconds
        self._seen[True].clear()
        self._last = None

    def _keep(self, compiled: bool) -> None:
        if self._name is None or (compiled and self._first is None):
            return
        pace = statistics.median(self._seen[compiled])
        wait = None if self._first is None else max(0.0, self._first - pace)
        measured = Measured(wait=wait, step=pace) if compiled else Measured(plain=pace)
        compiler_waits.keep(self._name, measured)
