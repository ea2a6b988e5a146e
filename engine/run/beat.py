"""A rank's heartbeat: once a second what it does is written down, so that one that hangs can be named from outside.

`beats/RANK.json` says who the process is, for how long its main thread has stood at one place, where that is, and which
collective it waits in. It is read by `engine.run.hang`. The thread looks at the main thread's stack from beside it and asks
torch's flight recorder only once that stands still, so a step costs nothing; a process that is stopped, or whose interpreter
is held by a call, writes nothing, which tells as much.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

from engine.errors import WorkbenchError
from engine.run import inside
from engine.run.process import identity
from engine.run.store import RunFolder

FOLDER = "beats"
BEAT_SECONDS = 1.0
DEPTH = 16
"""Frames of the stack that are looked at and told, the innermost first."""
_WAITS = {"_engine_run_backward": "the backward pass"}
"""Functions of torch in which a rank waits for others without a name of their own, where nothing records collectives."""


@dataclass(frozen=True)
class Collective:
    """The last collective that a rank began: what it does, which one of its group it is, and whether it is still under way."""

    operation: str
    number: int
    active: bool
    group: str = ""


class Beat:
    """`with Beat(run, rank, collective):` around all that a rank does; `tick` says that it got on.

    `collective` gives the last collective, None where nothing records them.
    """

    def __init__(self, run: RunFolder, rank: int, collective: Callable[[], Collective | None]) -> None:
        self.run = run
        self.rank = rank
        self.ticks = 0
        self._collective = collective
        self._main = threading.main_thread().ident
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        me = identity()
        self._said: dict[str, Any] = {"rank": rank, **(me.as_json() if me is not None else {}), "beat": 0}
        self._place: tuple[Any, ...] = ()
        self._still = 0.0

    def __enter__(self) -> Beat:
        with contextlib.suppress(OSError):  # a disk that is full is told by what needs it
            inside.make_folder(self.run, FOLDER, exist_ok=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: TracebackType | BaseException | None) -> None:
        self._over.set()
        self._thread.join(BEAT_SECONDS)
        self._write(over=True)

    def tick(self) -> None:
        """This rank got on: what comes is not what was before, though it may look alike."""
        self.ticks += 1

    def _beat(self) -> None:
        then = time.monotonic()
        while not self._over.wait(BEAT_SECONDS):
            now = time.monotonic()
            # A machine that slept, or was stopped as a whole, did not hang meanwhile.
            self.sample(min(now - then, 2 * BEAT_SECONDS))
            then = now

    def sample(self, passed: float) -> None:
        """Sees where the main thread is, `passed` seconds after the last look, and writes it down."""
        frames = _frames(sys._current_frames().get(self._main or 0))
        place = (self.ticks, *((frame.f_code, frame.f_lasti) for frame in frames))
        waits, number, group = "", 0, ""
        if place != self._place:
            self._place, self._still = place, 0.0
        elif (last := self._last()) is None:
            self._still += passed
            waits = _waits(frames)
        else:
            # NCCL's are recorded everywhere; one of gloo's beside them only the stack knows.
            waits, number, group = last.operation if last.active else _collective(frames), last.number, last.group
            same = (self._said.get("number"), self._said.get("group")) == (number, group)
            self._still = self._still + passed if same else 0.0
        stack = [_describe_frame(frame) for frame in frames]
        at = stack[0] if stack else ""
        self._write(still=round(self._still, 1), waits=waits, number=number, group=group, at=at, stack=stack)

    def _last(self) -> Collective | None:
        try:
            return self._collective()
        except Exception:  # noqa: BLE001 - records that cannot be read; a rank without a heartbeat would be called silent
            return None

    def _write(self, **changes: Any) -> None:
        # A new one each time: at the end the thread may still be writing.
        self._said = {**self._said, **changes, "beat": self._said["beat"] + 1}
        try:
            inside.replace(self.run, f"{FOLDER}/{self.rank}.json", json.dumps(self._said) + "\n", durable=False)
        except (OSError, WorkbenchError):
            return  # a disk that is full or away: the next one may be written


def _frames(frame: FrameType | None) -> list[FrameType]:
    found: list[FrameType] = []
    while frame is not None and len(found) < DEPTH:
        found.append(frame)
        frame = frame.f_back
    return found


def _collective(frames: list[FrameType]) -> str:
    """torch's collective that the stack stands in; empty where it is none."""
    for frame in reversed(frames):
        path = frame.f_code.co_filename.replace(os.sep, "/")
        if "/torch/distributed/distributed_c10d" in path:
            return frame.f_code.co_name
    return ""


def _waits(frames: list[FrameType]) -> str:
    """What the others are waited for in, by the functions on the stack; empty where it is none of torch's for several."""
    found = _collective(frames)
    return found or next((_WAITS[frame.f_code.co_name] for frame in frames if frame.f_code.co_name in _WAITS), "")


def _describe_frame(frame: FrameType) -> str:
    path = "/".join(frame.f_code.co_filename.split(os.sep)[-3:])
    return f"{path}:{frame.f_lineno} {frame.f_code.co_name}"
