"""Asking a run for something: one small file renamed into `control/`; the answer is a `control` event.

It owns the form of a request and the worker's side of it. A file that is no request is answered `refused` and never
stops the worker. Four things can be asked: `stop` (after this step, no new checkpoint), `save_stop` (checkpoint, then
stop), `checkpoint` (and go on), `end_of_epoch` (stop there, with a checkpoint).
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from engine.errors import WorkbenchError, visible
from engine.run import inside, slurm
from engine.run.inside import UnsafeRunFile
from engine.run.process import signal_name
from engine.run.store import ENDED, RunFolder, called

if TYPE_CHECKING:
    from engine.run.async_writer import AsyncWriter
    from engine.run.events import EventWriter
    from engine.run.view import RunView

DO = ("stop", "save_stop", "checkpoint", "end_of_epoch")
STOPS = ("stop", "save_stop")
"""Those that end the run at the next moment at which it can."""
_MAX_BYTES = 4096
# The folder is listed when it changed, and each second whatever its time says; a time may stand still for a tick.
LIST_SECONDS, TICK_NS = 1.0, 50_000_000


@dataclass(frozen=True)
class Request:
    """One request as the worker sees it. `now` asks the supervisor to signal the worker at once; `hurried` is of one who has no
    more time than `grace_seconds`, as a scheduler's limit or `docker stop` leave it."""

    id: str
    do: str
    by: str
    t: float
    now: bool = False
    hurried: bool = False
    path: Path | None = None


def request(folder: RunFolder, do: str, by: str = "", *, now: bool = False, hurried: bool = False) -> str:
    """Put a request into the run's folder; returns its id. Raises WorkbenchError where nobody could answer it.

    With `hurried` a step that is longer than the run's grace is not waited for: who asks is ended himself soon after.
    A request to end takes a job that waits in a cluster out of its queue.
    """
    if do not in DO:
        raise WorkbenchError(f"control: must be one of {', '.join(DO)}; got {visible(do)}.")
    state = folder.state
    if state in ENDED:
        raise WorkbenchError(
            f"run {folder.id} is {state}; there is nothing to ask of it.",
            "" if state == "finished" else f"`workbench resume {called(folder)}` goes on.",
        )
    name = f"{time.time_ns():020d}-{secrets.token_hex(4)}"
    body: dict[str, Any] = {
        "v": 1,
        "id": name,
        "t": time.time(),
        "do": do,
        "by": by or f"process {os.getpid()}",
        "now": now,
        "hurried": hurried,
    }
    try:
        inside.replace(folder, folder.control / f"{name}.json", json.dumps(body))
    except OSError as problem:
        raise WorkbenchError(f"run {folder.id} cannot be asked: {problem.strerror}.") from problem
    if state == "queued" and do != "checkpoint" and slurm.is_job(folder) and slurm.cancel_waiting(folder, body["by"]):
        remove(folder, folder.control / f"{name}.json")
    return name


def answer(view: RunView, id: str) -> dict[str, Any] | None:
    """What the run said to this request so far: `{"do", "status", "message"}`, or nothing yet."""
    return view.controls.get(id)


def parse(path: Path) -> Request | str:
    """The request in a file of `control/`, or the reason why it is none. Raises FileNotFoundError when it is gone."""
    try:
        text = inside.read(path.parent.parent, path, _MAX_BYTES + 1)
    except FileNotFoundError:
        raise
    except UnsafeRunFile:
        return "it is not a plain file of the run's owner"
    except OSError as problem:
        return problem.strerror or "it cannot be read"
    if len(text) > _MAX_BYTES:
        return f"it is longer than {_MAX_BYTES} bytes"
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return "it is not JSON"
    if not isinstance(body, dict) or not isinstance(body.get("id"), str) or not 0 < len(body["id"]) <= 200:
        return "it has no id"
    if body.get("do") not in DO:
        return f"`do` must be one of {', '.join(DO)}; got {visible(str(body.get('do')))[:60]}"
    t = body.get("t")
    return Request(
        id=body["id"],
        do=body["do"],
        by=visible(str(body.get("by") or "someone"))[:100],
        t=float(t) if isinstance(t, (int, float)) else 0.0,
        now=body.get("now") is True,
        hurried=body.get("hurried") is True,
        path=path,
    )


class Controls:
    """The worker's ear: `pending()` between steps, `answer()` when a request is accepted, done or refused.

    With a writer, files that are no request are refused as they are found. After `listen` the folder is looked at on the
    writer's thread, and a step asks for nothing but what was heard. `on_signals` turns SIGTERM and SIGINT into
    a `save_stop`, so a terminal's Ctrl-C, a scheduler and a person are served by the same code.
    """

    def __init__(self, folder: RunFolder, writer: EventWriter | None = None, *, every: float = 0.1) -> None:
        self.folder = folder
        self.writer = writer
        self.every = every
        self._known: set[str] = set()
        self._next_look = self._next_list = 0.0
        self._changed = 0
        self._signals: list[Request] = []
        self._stop_asked = False
        self._looking = threading.Lock()
        self._listening = False
        self._heard: list[Request] = []

    def listen(self, writer: AsyncWriter) -> None:
        """From now on the folder is looked at beside the steps."""
        self._listening = True
        writer.beside(self._poll)

    def _poll(self) -> None:
        with self._looking:
            self._heard += self._from_folder()

    def pending(self) -> list[Request]:
        """Requests not seen before, oldest first. Looks at the folder at most every tenth of a second.

        A signal is the supervisor's way to hurry a plain `stop` along: it makes no `save_stop` of it.
        """
        if self._listening and not self._heard and not self._signals:
            return []
        signals, self._signals = self._signals, []
        with self._looking:
            fresh, self._heard = self._heard, []
            # A signal comes after its request, which must not be missed.
            if signals:
                self._next_look = self._next_list = 0.0
            if signals or not self._listening:
                fresh = fresh + self._from_folder()
        self._stop_asked |= any(request.do == "stop" for request in fresh)
        return fresh if self._stop_asked else [*signals, *fresh]

    def stop_waits(self) -> bool:
        """Whether a request to stop now is among those that the next `pending` gives: for what takes long before any step."""
        if not self._listening:
            with self._looking:
                self._heard += self._from_folder()
        return bool(self._signals) or any(request.do in STOPS for request in self._heard)

    def _from_folder(self) -> list[Request]:
        fresh: list[Request] = []
        now = time.monotonic()
        if now < self._next_look:
            return fresh
        self._next_look = now + self.every
        try:
            names = inside.names(self.folder, self.folder.control) if self._may_hold_news(now) else []
        except (OSError, UnsafeRunFile):
            return fresh  # as in `lying`: a training goes on
        for name in names:
            if name in self._known or name.startswith("."):
                continue
            self._known.add(name)
            path = self.folder.control / name
            try:
                request = parse(path)
            except FileNotFoundError:
                continue
            if isinstance(request, Request):
                fresh.append(request)
            elif self.writer is not None:
                self.answer(Request(id=visible(name)[:100], do="", by="", t=0.0, path=path), "refused", request)
        return fresh

    def _may_hold_news(self, now: float) -> bool:
        """Whether the folder changed since it was last listed; once a second it is taken to have, for file systems that
        tell late."""
        changed = inside.lstat(self.folder, self.folder.control).st_mtime_ns
        if changed == self._changed and now < self._next_list:
            return False
        self._next_list = now + LIST_SECONDS
        # Another file may come within the same tick: a fresh time is not remembered.
        self._changed = changed if abs(time.time_ns() - changed) > TICK_NS else 0
        return True

    def answer(self, request: Request, status: str, message: str = "") -> None:
        """Say `accepted`, `done` or `refused`; the last two take the file away."""
        assert status in ("accepted", "done", "refused")
        if self.writer is not None:
            self.writer.write("control", id=request.id, do=request.do, status=status, by=request.by, message=message)
        if status != "accepted" and request.path is not None:
            remove(self.folder, request.path)

    def on_signals(self) -> None:
        """SIGTERM and SIGINT ask for `save_stop`; a second one has its ordinary effect. Main thread only."""

        def ask(number: int, _: FrameType | None) -> None:
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)
            name = signal_name(number)
            self._signals.append(Request(id=f"signal-{name}", do="save_stop", by=name, t=time.time()))

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, ask)
        # A terminal that goes away is no reason to stop.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def lying(folder: RunFolder) -> Iterator[Request]:
    """The requests that lie in `control/`, by name; none where that cannot be listed. What is no request is passed over."""
    try:
        names = inside.names(folder, folder.control)
    except (OSError, UnsafeRunFile):
        return  # the disk may be away for a moment, or somebody took the folder; the run is watched all the same
    for name in names:
        if name.startswith(".") or not name.endswith(".json"):
            continue
        try:
            found = parse(folder.control / name)
        except FileNotFoundError:
            continue
        if isinstance(found, Request):
            yield found


def asks_to_end(folder: RunFolder) -> bool:
    """Whether a request to stop lies there, which nobody has taken up yet."""
    return any(found.do in STOPS for found in lying(folder))


def drop_old(folder: RunFolder) -> None:
    """Requests to a worker of before go; folders that a copy of the run left out are there again."""
    for part in (folder.control, folder.checkpoints, folder.samples, folder.index):
        inside.make_folder(folder, part, exist_ok=True)
    for name in inside.names(folder, folder.control):
        remove(folder, folder.control / name)


def remove(folder: RunFolder, path: Path) -> None:
    """Take a request file away, whatever it is; a folder in its place is only renamed."""
    try:
        if stat.S_ISDIR(inside.lstat(folder, path).st_mode):
            inside.rename(folder, path, path.with_name(f".refused-{secrets.token_hex(4)}"))
        else:
            inside.remove(folder, path)
    except FileNotFoundError:
        return
