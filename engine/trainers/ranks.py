"""What each of several processes does by itself: tokens, waiting for data, the forward pass, memory.

Ranks wait for each other in the backward pass, so a step takes all of them as long as the slowest. What tells them apart is
what they do alone: reading rows, and with DDP the forward pass; with FSDP2 layers are put together in it, which waits for
others too. Each rank's figures travel with the counts of tokens, in the message that is sent anyway.
"""

from __future__ import annotations

import functools
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from engine.trainers.clock import StepClock

MEMORY_SECONDS = 0.5  # torch's memory statistics take 0.2 ms to read, too much for every step
RANKS_SECONDS = 1.0


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


class Ranks:
    """The figures of all ranks of a run, on each of them; `event` makes the line that the first one writes."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._computed = 0.0
        self._passes: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._memory, self._memory_next = 0, 0.0
        self._tokens: list[int] = []
        self._rows: list[list[int]] = []
        self._before: tuple[float, int, list[int], list[list[int]]] | None = None

    def computes(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, its time counted as this rank's forward pass: on a GPU by the device's own clock."""

        @functools.wraps(compute)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._clock.paused:
                return compute(*args, **kwargs)
            if torch.cuda.is_available():
                begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begun.record()
                loss = compute(*args, **kwargs)
                done.record()
                self._passes.append((begun, done))
                return loss
            began = time.monotonic()
            loss = compute(*args, **kwargs)
            self._computed += time.monotonic() - began
            return loss

        return timed

    def own(self) -> list[int]:
        """This rank's figures since it began: microseconds of waiting for data and of forward passes, and bytes of memory."""
        while self._passes and self._passes[0][1].query():
            begun, done = self._passes.popleft()
            self._computed += begun.elapsed_time(done) / 1e3
        now = time.monotonic()
        if now >= self._memory_next:
            self._memory, self._memory_next = memory_now()["memory_allocated"], now + MEMORY_SECONDS
        return [int(self._clock.waited * 1e6), int(self._computed * 1e6), self._memory]

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
        before, self._before = self._before, (now, step, self._tokens, self._rows)
        if before is None or step <= before[1]:
            return None
        since, steps = now - before[0], step - before[1]
        tokens = [(new - old) / since for new, old in zip(self._tokens, before[2], strict=True)]
        spent = [
            [(new[part] - old[part]) / 1e6 / steps for new, old in zip(self._rows, before[3], strict=True)]
            for part in (0, 1)
        ]
        return {
            "step": step,
            "tokens_per_second": [round(rate, 1) for rate in tokens],
            "data_seconds": [round(seconds, 6) for seconds in spent[0]],
            "forward_seconds": [round(seconds, 6) for seconds in spent[1]],
            "memory": [row[2] for row in self._rows],
        }
