"""How long a step takes and how much of that is waiting for data.

A step's seconds are those on the wall, from one logged step to the next, when the host has waited for the device anyway:
what lies between two calls on the host tells nothing of a device that works behind it. Evaluation, saving and sampling are
no part of a step, and begin when the device has done the steps before them. Waiting for data is the reading and collating of rows, which happens while the step is on the host; a
batch's way to the device is not, since it waits for the step before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


class Moment(NamedTuple):
    """The end of a step: when that was, and what had been paused and read since the last one that was logged, in seconds."""

    at: float
    paused: float
    read: float


class StepClock:
    """`lap` gives the means since the last one; `pause` encloses what belongs to no step, `reads` what reads rows."""

    def __init__(self) -> None:
        self.waited = 0.0
        """Seconds that waited for data, of all steps together."""
        self.out = 0.0
        """Seconds that belonged to no step, since the beginning."""
        self.settle: Callable[[], None] = lambda: None
        """Waits until the device has done what it was given."""
        self.ended: Moment | None = None
        """When the step that is being logged was over, where that is a while ago."""
        self.start(0)

    def moment(self) -> Moment:
        """This moment, for a step that is over now and logged later."""
        return Moment(time.monotonic(), self._paused, self._read)

    def now(self) -> float:
        """The end of the step that is being logged."""
        return time.monotonic() if self.ended is None else self.ended.at

    @property
    def paused(self) -> bool:
        """Whether what happens now belongs to no step."""
        return self._pauses > 0

    def start(self, step: int) -> None:
        """Steps are measured from now on; `step` is the last one made."""
        self._began, self._step = time.monotonic(), step
        self._paused = self._read = 0.0
        self._pauses = 0

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Time that belongs to no step; one inside another counts once."""
        if not self._pauses:
            self.settle()
        began = time.monotonic()
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                spent = time.monotonic() - began
                self._paused += spent
                self.out += spent

    def reads(self, read: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, its time counted as waiting for data unless nothing waits."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.monotonic()
            try:
                return read(*args, **kwargs)
            finally:
                if not self._pauses:
                    spent = time.monotonic() - began
                    self._read += spent
                    self.waited += spent

        return timed

    def lap(self, step: int) -> tuple[float, float]:
        """Seconds of one step and seconds of it that waited for data, as means over the steps since the last lap."""
        end = self.moment() if self.ended is None else self.ended
        steps = max(1, step - self._step)
        seconds = max(0.0, end.at - self._began - end.paused) / steps
        read = min(end.read / steps, seconds)
        self._began, self._step = end.at, step
        # What came behind the end is the next step's: its batch is read before this one is logged.
        self._paused, self._read = self._paused - end.paused, self._read - end.read
        return seconds, read
