"""Work for an assistant on threads of its own: progress is told while it goes, and it ends where the call is cancelled.

One inspector answers what needs torch, as in the app; it starts with the first question. No word of `mcp` here: who serves
gives `tell`, and awaits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import anyio

from engine.client import Inspector, Ticket
from engine.errors import Cancelled
from engine.figures import doing

Result = TypeVar("Result")
Tell = Callable[[float, float | None, str], Awaitable[None]]
"""`tell(progress, total, message)`: progress only grows."""
THREADS = 8
LOOK_SECONDS, TELL_SECONDS = 0.25, 0.5


class Job:
    """One piece of work, as its thread sees it."""

    def __init__(self, inspector: Inspector) -> None:
        self._inspector = inspector
        self._ticket: Ticket | None = None
        self._ended = threading.Event()
        self._began = time.monotonic()
        self.state: tuple[float | None, float | None, str] = (None, None, "")
        """(done, total, message) as last said; without `done` the seconds count."""

    def ask(self, do: str, **params: Any) -> Any:
        """The inspector's answer. Raises WorkbenchError, and Cancelled where the call was."""
        self._ticket = self._inspector.ask(do, on_progress=self._progress, **params)
        if self.cancelled:
            self._ticket.cancel()
        return self._ticket.result()

    def say(self, message: str, done: float | None = None, total: float | None = None) -> None:
        """Note how far it is."""
        self.state = (done, total, message)

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for it any more."""
        return self._ended.is_set()

    def wait(self, seconds: float = LOOK_SECONDS) -> None:
        """Sleep so long. Raises Cancelled where nobody waits for it any more."""
        if self._ended.wait(seconds):
            raise Cancelled("cancelled")

    def cancel(self) -> None:
        """Nobody waits for it any more: an open question is given up."""
        self._ended.set()
        if self._ticket is not None:
            self._ticket.cancel()

    def progress_after(self, last: float) -> tuple[float, float | None, str]:
        """What to tell: more than `last`, whatever was said."""
        done, total, message = self.state
        if done is None:
            return max(time.monotonic() - self._began, last), None, message
        return max(done, last), total, message

    def _progress(self, state: dict[str, Any]) -> None:
        self.say(doing(state))


class Jobs:
    """All work under way, and the inspector that it asks."""

    def __init__(self) -> None:
        self._inspector = Inspector()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="assistant")
        self._open: set[Job] = set()

    async def run(self, work: Callable[[Job], Result], tell: Tell) -> Result:
        """What `work(job)` gives, on a thread; cancelled with the task that awaits it."""
        job = Job(self._inspector)
        self._open.add(job)
        future = self._threads.submit(work, job)
        told, message, pause = 0.0, "", 0.005
        try:
            over = False
            while not over:
                await anyio.sleep(pause)
                pause, over = min(2 * pause, LOOK_SECONDS), future.done()  # what it said last is told, too
                progress, total, words = job.progress_after(told)
                if (progress > told + TELL_SECONDS and total is None and words) or (words and words != message):
                    told, message = max(progress, told + 1e-6), words
                    await tell(told, total, words)
            return future.result()
        finally:
            future.cancel()
            job.cancel()
            self._open.discard(job)

    def close(self) -> None:
        """End all work and the inspector."""
        for job in list(self._open):
            job.cancel()
        self._inspector.close()
        self._threads.shutdown(wait=True, cancel_futures=True)
