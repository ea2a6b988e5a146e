"""Requests to stop that a worker does not answer: it is sent SIGTERM, and SIGKILL where that does not end it either.

How long it has is `grace_seconds` of run.json. A save under way is never cut short; an answer that never comes is. A worker
that has said how the run ended, and stays all the same, is ended too. Standard library only.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from typing import Any

from engine.run import control, inside
from engine.run.state_file import StateFile
from engine.run.store import RunFolder
from engine.run.worker_process import WorkerProcess

DEFAULT_GRACE = 60.0
# Between SIGTERM and SIGKILL where the person wants it now, and after a worker's own final event.
NOW_SECONDS = 5.0
LEAVE_SECONDS = 30.0


class StopRequests:
    """What was asked of one worker, as its supervisor sees it."""

    def __init__(self, run: RunFolder, state: StateFile) -> None:
        self.run, self.state = run, state
        self.overdue: control.Request | None = None
        """For whose sake the worker is ended, or is about to be."""
        self._answered: dict[str, str] = {}
        self._first_seen: dict[str, float] = {}
        self._term_at: float | None = None
        self._killed = False

    def note(self, answer: Mapping[str, Any]) -> None:
        """A `control` event: what the worker answered to a request."""
        self._answered[str(answer.get("id"))] = str(answer.get("status"))

    def watch(self, worker: WorkerProcess, ended_at: float | None) -> None:
        """End a worker that was asked to stop and does not answer, and one that said its last word at `ended_at` but stays."""
        now = time.monotonic()
        if ended_at is not None:
            self._end(worker, now, ended_at, LEAVE_SECONDS, NOW_SECONDS, leaving=True)
            return
        for name in inside.names(self.run, self.run.control):
            path = self.run.control / name
            if name.startswith(".") or not name.endswith(".json"):
                continue
            try:
                request = control.parse(path)
            except FileNotFoundError:
                continue
            if not isinstance(request, control.Request) or request.do not in control.STOPS:
                continue
            since = self._first_seen.setdefault(name, now)
            if request.now:
                self.overdue = request
                self._end(worker, now, since, 0.0, NOW_SECONDS)
            elif request.do == "stop" or request.id not in self._answered:
                # A save under way is never cut short; an answer that never comes is.
                grace = self._grace()
                if now - since >= grace:
                    self.overdue = request
                    self._end(worker, now, since, grace, grace)

    def last_events(self) -> list[dict[str, Any]]:
        """What is left to write of a worker that was ended as somebody asked: that this was done, and that the run stopped.
        Empty where no signal was sent, or for nobody's sake."""
        request = self.overdue
        if request is None or self._term_at is None:
            return []
        message = "The worker was ended by " + ("SIGKILL" if self._killed else "SIGTERM") + self._why(request)
        final = {"kind": "stopped", "step": None, "by": request.by, "message": message}
        if self._answered.get(request.id, "accepted") != "accepted":
            return [final]
        about = {"id": request.id, "do": request.do, "status": "done", "by": request.by, "message": message}
        return [{"kind": "control", **about}, final]

    def _why(self, request: control.Request) -> str:
        if request.now:
            return " at once, as asked; checkpoints made before are kept."
        return f" because it did not answer within {self._grace():.0f} s; checkpoints made before are kept."

    def _grace(self) -> float:
        value = self.run.read_json().get("grace_seconds")
        return float(value) if isinstance(value, (int, float)) and value > 0 else DEFAULT_GRACE

    def _end(
        self,
        worker: WorkerProcess,
        now: float,
        since: float,
        term_after: float,
        kill_after: float,
        *,
        leaving: bool = False,
    ) -> None:
        """SIGTERM so many seconds after `since`, SIGKILL so many after that; one step at a call."""
        if self._term_at is None:
            if now - since >= term_after and worker.may_be_signalled(leaving=leaving):
                self._term_at = now
                self.state.say(state="stopping", message="The worker does not answer; it was sent SIGTERM.")
                worker.send(signal.SIGTERM)
        elif now - self._term_at >= kill_after and not self._killed and worker.may_be_signalled(leaving=leaving):
            self._killed = True
            self.state.say(state="stopping", message="The worker does not answer; it was sent SIGKILL.")
            worker.kill()
