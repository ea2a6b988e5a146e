"""What lies on the card where most of it is taken: who asked for it, by the lines of code, from the allocator's own record."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

LINES, DEEPEST = 24, 4
_OURS = "/engine/", "torchinductor", "/benchmarks/", "modeling_", "bitsandbytes"
"""Parts of the names of files whose lines say more than the libraries' around them."""


@contextlib.contextmanager
def peak(name: str) -> Iterator[None]:
    """Prints what was on the card at the peak of what is done within, also where it ran out of memory."""
    held = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=4_000_000)
    try:
        yield
    finally:
        traces = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        torch.cuda.memory._record_memory_history(enabled=None)
        print("\n".join(summary(name, traces, held)), flush=True)


def summary(name: str, trace: Iterable[Mapping[str, Any]], held: int) -> list[str]:
    """The lines of `peak`, of the allocator's events in order; `held` bytes were there before."""
    live: dict[int, Mapping[str, Any]] = {}
    total, most, at_most = held, held, dict[int, Mapping[str, Any]]()
    risen = False
    for event in trace:
        if event["action"] == "alloc":
            live[event["addr"]] = event
            total += event["size"]
            risen = risen or total > most
            most = max(most, total)
        elif event["action"] == "free_completed":
            if risen:
                at_most, risen = dict(live), False
            gone = live.pop(event["addr"], event)
            total -= gone["size"]
    if risen:
        at_most = live
    by_place: dict[tuple[str, int], int] = defaultdict(int)
    for event in at_most.values():
        by_place[_place(event.get("frames", ())), event["size"]] += 1
    found = [f"{name}: {most / 2**30:.2f} GiB at the peak, {held / 2**30:.2f} of them before"]
    largest = sorted(by_place.items(), key=lambda item: -item[0][1] * item[1])
    for (place, size), count in largest[:LINES]:
        found.append(f"  {size * count / 2**20:9.1f} MiB = {count:5} x {size / 2**20:8.2f} MiB  {place}")
    rest = sum(size * count for (_, size), count in largest[LINES:])
    return [*found, f"  {rest / 2**20:9.1f} MiB in {max(len(largest) - LINES, 0)} other places"]


def segments(snapshot: Iterable[Mapping[str, Any]]) -> list[str]:
    """What the allocator holds of the card and nothing is in, by the size of what it asked the driver for: of
    `torch.cuda.memory_snapshot()`, those with the most first."""
    by_size: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for each in snapshot:
        of_size = by_size[each["total_size"]]
        of_size[0] += 1
        of_size[1] += each["total_size"] - each["active_size"]
    largest = sorted(by_size.items(), key=lambda item: -item[1][1])
    total = sum(free for _, free in by_size.values())
    found = [f"  {total / 2**20:.1f} MiB held with nothing in them"]
    for size, (count, free) in largest[:LINES]:
        found.append(f"  {free / 2**20:9.1f} MiB of {count:5} x {size / 2**20:8.2f} MiB")
    return found


def in_pools(snapshot: Iterable[Mapping[str, Any]]) -> int:
    """Bytes that the allocator holds for recorded CUDA graphs alone, of `torch.cuda.memory_snapshot()`: their pools' segments.

    Once recorded, what a graph writes into while it is played counts as free, and nobody else gets it.
    """
    return sum(each["total_size"] for each in snapshot if tuple(each.get("segment_pool_id", (0, 0))) != (0, 0))


def _place(frames: Iterable[Mapping[str, Any]]) -> str:
    """The innermost lines that say something, the first of them innermost."""
    every = [frame for frame in frames if str(frame["filename"]).endswith(".py")]
    telling = [frame for frame in every if any(part in frame["filename"] for part in _OURS)] or every
    lines = [f"{frame['filename'].rpartition('/')[2]}:{frame['line']} {frame['name']}" for frame in telling[:DEEPEST]]
    return " < ".join(lines) or "no line of Python"
