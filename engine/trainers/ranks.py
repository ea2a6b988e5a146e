"""What each of several processes does by itself, and how long it waits for others: tokens, data, forward pass, memory, messages.

Ranks wait for each other in the backward pass, so a step takes all of them as long as the slowest. What tells them apart is
what they do alone: reading rows, and the forward pass without the waits in it. Who is late for whatever reason waits less than
the others. Each rank's figures travel with the counts of tokens, in the message that is sent anyway.
"""

from __future__ import annotations

import datetime
import functools
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from engine.compat import collective_waits
from engine.trainers.clock import StepClock

MEMORY_SECONDS = 0.5  # torch's memory statistics take 0.2 ms to read, too much for every step
RANKS_SECONDS = 1.0
WAITS_SECONDS = 0.25  # on a GPU a step's waits are measured so often: with FSDP2 they take some hundred events


def memory_now() -> dict[str, int]:
    """The device's memory as torch accounts for it; on a CPU the process's own, where the weights lie."""
    if not torch.cuda.is_available():
        return {"memory_allocated": _resident_bytes()}
    stats = torch.cuda.memory_stats()
    return {
        "memory_allocated": stats["allocated_bytes.all.current"],
        "memory_reserved": stats["reserved_bytes.all.current"],
        "memory_peak": stats["allocated_bytes.all.peak"],
    }


_PAGE = os.sysconf("SC_PAGE_SIZE")


def _resident_bytes() -> int:
    """This process's resident memory; on a CPU the weights lie there."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:
        import psutil

        return psutil.Process().memory_info().rss


Mark = float | torch.cuda.Event


class Waits:
    """Of the steps that are measured: seconds in which this process's computation stood still for a collective, which is what of
    the communication nothing hides (exposed communication, waiting for a rank that is late included), and seconds of its forward
    passes without that.

    Counted are gradients, buffers, the weights that FSDP2 puts together, tokens that go to the experts of others, counts and
    means over ranks and what they agree on after a step; not what lies inside attention over several GPUs, and not the norm of
    sharded gradients or of divided experts'. On a GPU they are spans between two events on the stream that computes, read when
    they are over; the host waits for none.
    """

    def __init__(self, clock: StepClock, every: float | None = None) -> None:
        """`every` so many seconds a step is measured."""
        self.steps = 0
        """How many were measured."""
        self._clock = clock
        self._every = (WAITS_SECONDS if torch.cuda.is_available() else 0.0) if every is None else every
        self._waited = self._passes = 0.0
        self._passing = False
        self._measures, self._next = True, time.monotonic() + self._every
        self._spans: deque[tuple[torch.cuda.Event, torch.cuda.Event, int, int]] = deque()
        self._free: list[torch.cuda.Event] = []

    def spent(self) -> tuple[float, float]:
        """Seconds of waiting and of forward passes, of all steps that were measured."""
        while self._spans and self._spans[0][1].query():
            begun, done, waited, passed = self._spans.popleft()
            self._add(begun.elapsed_time(done) / 1e3, waited, passed)
            self._free += begun, done
        return self._waited, self._passes

    def _add(self, seconds: float, waited: int, passed: int) -> None:
        self._waited += waited * seconds
        self._passes += passed * seconds

    def step_over(self) -> None:
        """A step is made: whether the next one is measured."""
        self.steps += self._measures
        now = time.monotonic()
        self._measures = now >= self._next
        if self._measures:
            self._next = now + self._every

    def mark(self) -> Mark | None:
        """This moment, of the computation; None in what is not measured."""
        if not self._measures or self._clock.paused:
            return None
        return self._event() if torch.cuda.is_available() else time.monotonic()

    def _event(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def until(self, begun: Mark | None) -> None:
        """The computation has waited since that moment."""
        self._over(begun, 1, -1 if self._passing else 0)

    def _over(self, begun: Mark | None, waited: int, passed: int) -> None:
        if isinstance(begun, float):
            self._add(time.monotonic() - begun, waited, passed)
        elif begun is not None:
            self._spans.append((begun, self._event(), waited, passed))

    def forward(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, its time a forward pass."""

        @functools.wraps(compute)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if (begun := self.mark()) is None:
                return compute(*args, **kwargs)
            self._passing = True
            try:
                loss = compute(*args, **kwargs)
            finally:
                self._passing = False
            self._over(begun, 0, 1)
            return loss

        return timed

    @contextmanager
    def span(self) -> Iterator[None]:
        """What is done within it is waiting for others."""
        begun = self.mark()
        yield
        self.until(begun)

    def around(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, all of its time waiting for others."""

        @functools.wraps(collective)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.span():
                return collective(*args, **kwargs)

        return timed

    def after_gradients(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        """The same backward pass, of a loss under DDP: what comes once all gradients are computed is waiting for others'."""

        @functools.wraps(backward)
        def timed(loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not loss.requires_grad:
                return backward(loss, *args, **kwargs)
            computed: list[Mark | None] = []
            hook = collective_waits.when_computed(loss, lambda: computed.append(self.mark()))
            try:
                result = backward(loss, *args, **kwargs)
            finally:
                hook.remove()
            for moment in computed:
                self.until(moment)
            return result

        return timed


class Ranks:
    """The figures of all ranks of a run, on each of them; `event` makes the line that the first one writes."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self.waits = Waits(clock)
        self._memory, self._memory_next = 0, 0.0
        self._tokens: list[int] = []
        self._rows: list[list[int]] = []
        self._before: tuple[float, float, int, list[int], list[list[int]]] | None = None
        self._hosts: dist.ProcessGroup | None = None

    def meet(self, seconds: float) -> None:
        """Makes the group in which hosts agree; all ranks call it together. `seconds` is how long they wait for each other.

        Beside NCCL it is one of gloo's: what hosts say to each other then waits for no card, which has steps of work before it.
        """
        if dist.get_backend() == "gloo":
            self._hosts = dist.group.WORLD
        elif self._hosts is None:
            self._hosts = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=seconds))

    def agreed(self, word: int) -> int:
        """The first rank's word, on each rank at the same call of this."""
        said = torch.tensor([word])
        with self.waits.span():
            dist.broadcast(said, src=0, group=self._hosts)
        return int(said.item())

    def own(self) -> list[int]:
        """This rank's figures since it began: microseconds of waiting for data, those of forward passes, bytes of memory,
        microseconds of waiting for others, and in how many steps passes and waits were measured."""
        now = time.monotonic()
        if now >= self._memory_next:
            self._memory, self._memory_next = memory_now()["memory_allocated"], now + MEMORY_SECONDS
        waited, passed = self.waits.spent()
        return [int(self._clock.waited * 1e6), int(passed * 1e6), self._memory, int(waited * 1e6), self.waits.steps]

    def take(self, table: list[list[int]]) -> None:
        """A row a rank: its new tokens, those of them that are trained, and its figures."""
        self._tokens = self._tokens or [0] * len(table)
        self._tokens = [before + row[0] for before, row in zip(self._tokens, table, strict=True)]
        self._rows = [row[2:] for row in table]

    def event(self, step: int, *, last: bool) -> dict[str, Any] | None:
        """A column for each figure, a value for each rank: means over the steps since the last one. None where too little
        time has passed, unless it is the last step."""
        now = time.monotonic()
        if not self._rows or (self._before is not None and now - self._before[0] < RANKS_SECONDS and not last):
            return None
        before, self._before = self._before, (now, self._clock.out, step, self._tokens, self._rows)
        if before is None or step <= before[2]:
            return None
        began, out, first, tokens_before, rows_before = before
        since, steps = now - began, step - first
        tokens = [(new - old) / since for new, old in zip(self._tokens, tokens_before, strict=True)]
        rows = list(zip(self._rows, rows_before, strict=True))
        data = [(new[0] - old[0]) / 1e6 / steps for new, old in rows]
        forward, waits = (
            [
                round((new[part] - old[part]) / 1e6 / (new[4] - old[4]), 6) if new[4] > old[4] else None
                for new, old in rows
            ]
            for part in (1, 3)
        )
        return {
            "step": step,
            "step_seconds": round((since - (self._clock.out - out)) / steps, 6),
            "tokens_per_second": [round(rate, 1) for rate in tokens],
            "data_seconds": [round(seconds, 6) for seconds in data],
            "forward_seconds": forward,
            "memory": [row[2] for row in self._rows],
            "communication_seconds": waits,
        }
