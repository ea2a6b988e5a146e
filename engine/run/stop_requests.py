"""Requests to stop that a worker does not answer: it is sent SIGTERM, and SIGKILL where that does not end it either.

How long it has is `grace_seconds` of run.json. A save under way is not cut short for as long as it moves: the time counts from
its end, or from `STILL_SECONDS` after it last wrote anything. Nor is a step that is to be saved, for as long as the worker
computes: a request is answered between steps, and one may take minutes; its time counts from when it was last seen to. Who is
`hurried` waits for no such step, who asks with `now` for neither. A worker that has said how the run ended, and stays all the
same, is ended too. Standard library only.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from typing import Any

from engine.errors import WorkbenchError
from engine.run import control, inside
from engine.run.state_file import StateFile
from engine.run.store import RunFolder
from engine.run.worker_process import WorkerProcess

DEFAULT_GRACE = 60.0
# Between SIGTERM and SIGKILL where the person wants it now, and after a worker's own final event.
NOW_SECONDS = 5.0
LEAVE_SECONDS = 30.0
STILL_SECONDS = 600.0
"""How long a save may change nothing in its folder before it is taken to hang: ranks gather shares, a file is read for its hash
or goes to a slow disk."""
LONG_STEP_SECONDS = 1800.0
"""How long a step may go on before a worker that computes all the time is taken to go round in circles: as long as ranks wait for
each other."""
WORKS = 0.2
"""Of a core: what a worker that computes takes, or waits for a GPU, whose end the host looks for all the time."""
LOOK_SECONDS = 1.0
_WHY = {
    "now": "The worker is ended at once, as asked",
    "answer": "The worker does not answer",
    "save": "The worker's save stands still",
    "leave": "The worker said how the run ended and stays",
}


class Save:
    """A checkpoint that the worker is writing, as its folder shows it."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self._looked = self._moved = time.monotonic()
        self._seen = self._files()

    def moves(self, now: float) -> bool:
        """Whether anything changed in what is being written, within the last `STILL_SECONDS`."""
        if now - self._looked >= LOOK_SECONDS:
            # What happened while nobody looked is not known to have happened then.
            files, self._looked = self._files(), now
            if files != self._seen:
                self._seen, self._moved = files, now
        return now - self._moved < STILL_SECONDS

    def _files(self) -> list[tuple[str, int, int]]:
        """Name, bytes and time of all that stands in folders that have no checkpoint's name yet."""
        try:
            return [
                (f"{name}/{inner}", info.st_size, info.st_mtime_ns)
                for name in inside.names(self.run, self.run.checkpoints)
                if name.endswith(".tmp")
                for inner, info in inside.entries(self.run, self.run.checkpoints / name)
            ]
        except (OSError, WorkbenchError):
            return []  # one of them went meanwhile


class Work:
    """Whether a worker computes, by the last `LOOK_SECONDS` in which that was looked at."""

    def __init__(self, worker: WorkerProcess, now: float) -> None:
        self._looked, self._busy, self._works = now, worker.busy_seconds(), False

    def goes_on(self, worker: WorkerProcess, now: float) -> bool:
        """Whether it computes at the moment."""
        if (passed := now - self._looked) >= LOOK_SECONDS:
            busy = worker.busy_seconds()
            # Of those that were there both times: what a helper had computed is gone with it.
            more = sum(max(0.0, seconds - self._busy[who]) for who, seconds in busy.items() if who in self._busy)
            self._works = more >= WORKS * passed
            self._looked, self._busy = now, busy
        return self._works


def _waits_for_step(request: control.Request) -> bool:
    """Whether a step that computes is waited for: it is to be saved, and there is time."""
    return request.do != "stop" and not request.hurried


class StopRequests:
    """What was asked of one worker, as its supervisor sees it."""

    def __init__(self, run: RunFolder, state: StateFile) -> None:
        self.run, self.state = run, state
        self.overdue: control.Request | None = None
        """For whose sake the worker is ended, or is about to be."""
        self._answered: dict[str, str] = {}
        self._first_seen: dict[str, float] = {}
        self._saves: str | None = None
        self._save: Save | None = None
        self._saved_at = 0.0
        self._work: Work | None = None
        self._worked_at = 0.0
        self._term_at: dict[str, float] = {}
        self._killed: set[str] = set()
        self._waited = ""
        """What was waited for, and how long, before the first signal for want of an answer."""

    def note(self, answer: Mapping[str, Any]) -> None:
        """A `control` event: what the worker answered to a request."""
        self._answered[str(answer.get("id"))] = str(answer.get("status"))

    def note_save(self, event: Mapping[str, Any]) -> None:
        """A `checkpoint` event: a save begins, or has its name."""
        if event.get("state") == "saving":
            self._saves, self._save = str(event.get("path")), None
        elif event.get("state") == "committed" and event.get("path") == self._saves:
            self._saves = self._save = None

    def watch(self, worker: WorkerProcess, ended_at: float | None) -> None:
        """End a worker that was asked to stop and does not answer, and one that said its last word at `ended_at` but stays."""
        now = time.monotonic()
        if ended_at is not None:
            # Who was to go at once has no more time for having said its last word.
            reason = "now" if "now" in self._term_at else "leave"
            self._end(worker, now, ended_at, LEAVE_SECONDS, NOW_SECONDS, reason, leaving=True)
            return
        for request in control.lying(self.run):
            if request.do in control.STOPS:
                self._watch_one(worker, now, request)

    def _watch_one(self, worker: WorkerProcess, now: float, request: control.Request) -> None:
        since = self._first_seen.setdefault(request.id, now)
        if request.now:
            self.overdue = request
            self._end(worker, now, since, 0.0, NOW_SECONDS, "now")
            return
        if self.overdue is not None and self.overdue.now:
            return  # who asks to end it at once is the one it is ended for
        if self._saves is not None:
            self._save = self._save or Save(self.run)
            if self._save.moves(now):
                self._saved_at = now
                return
        if request.do == "stop" or request.id not in self._answered or self._saves is not None:
            since, grace = max(since, self._saved_at), self._grace()
            if _waits_for_step(request) and self._saves is None and now - since < LONG_STEP_SECONDS:
                self._work = self._work or Work(worker, now)
                if self._work.goes_on(worker, now):
                    self._worked_at = now
                    return
                since = max(since, self._worked_at)  # idle for so long, not in this very moment
            if now - since >= grace:
                self.overdue = request
                self._waited = self._waited or self._describe(request, now)
                self._end(worker, now, since, grace, grace, "answer" if self._saves is None else "save")

    def last_events(self) -> list[dict[str, Any]]:
        """What is left to write of a worker that was ended as somebody asked: that this was done, and that the run stopped.
        Empty where no signal was sent, or for nobody's sake."""
        request, reasons = self.overdue, [reason for reason in self._term_at if reason != "leave"]
        if request is None or not reasons:
            return []
        killed = any(reason in self._killed for reason in reasons)
        message = "The worker was ended by " + ("SIGKILL" if killed else "SIGTERM") + self._why(reasons[-1])
        final = {"kind": "stopped", "step": None, "by": request.by, "message": message}
        if self._answered.get(request.id, "accepted") != "accepted":
            return [final]
        about = {"id": request.id, "do": request.do, "status": "done", "by": request.by, "message": message}
        return [{"kind": "control", **about}, final]

    def _why(self, reason: str) -> str:
        if reason == "now":
            return " at once, as asked; checkpoints made before are kept."
        if reason == "save":
            return f" because its save stood still for {STILL_SECONDS:.0f} s; checkpoints made before are kept."
        return f" because {self._waited}; checkpoints made before are kept."

    def _describe(self, request: control.Request, now: float) -> str:
        """What was waited for since the request, and how long."""
        asked, grace = self._first_seen[request.id], self._grace()
        since, after = (self._saved_at, "its save") if self._saved_at > asked else (asked, "")
        if _waits_for_step(request) and self._worked_at > since:
            if now - self._worked_at < grace:
                return f"its step still computed {now - since:.0f} s after {after or 'it was asked'}, and no step is given more"
            after = "it last computed"
        total = f", {now - asked:.0f} s after it was asked" if after else ""
        return f"it did not answer within {grace:.0f} s{after and f' after {after}'}{total}"

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
        reason: str,
        *,
        leaving: bool = False,
    ) -> None:
        """SIGTERM so many seconds after `since`, SIGKILL so many after that, for each reason anew; one step at a call."""
        term_at = self._term_at.get(reason)
        due = now - since >= term_after if term_at is None else now - max(term_at, since) >= kill_after
        if not due or reason in self._killed or not worker.may_be_signalled(leaving=leaving):
            return
        if term_at is None:
            self._term_at[reason] = now
            self._report_stop(reason, signal.SIGTERM, leaving)
            worker.send(signal.SIGTERM)
        else:
            self._killed.add(reason)
            self._report_stop(reason, signal.SIGKILL, leaving)
            worker.kill()

    def _report_stop(self, reason: str, number: signal.Signals, leaving: bool) -> None:
        """What the worker was sent and why; a run that has ended is not stopping."""
        state = {} if leaving else {"state": "stopping"}
        self.state.update(**state, message=f"{_WHY[reason]}; it was sent {number.name}.")
