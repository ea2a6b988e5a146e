"""Where the device's time goes in a step, as torch's profiler saw it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable

import torch

KINDS = (
    ("copies", r"^Memcpy|^Memset|direct_copy|copy_kernel|CatArrayBatched|clone"),
    ("attention", r"flash|fmha|attention|attn|sdpa|cudnn_generated|mha"),
    ("products", r"gemm|nvjet|cutlass|xmma|wgmma|gemv|splitk|_mm_|triton_tem"),
    ("scores of the head", r"scores_kernel|gradient_kernel|logp"),
    ("optimizer and clipping", r"multi_tensor|[Aa]dam|foreach|lpnorm"),
    ("reductions", r"triton_(red|per|mix)|reduce_kernel|softmax|norm"),
    ("elementwise", r"triton_(poi|for)|elementwise|vectorized|index|scatter|gather|fill"),
)
"""What a kernel does, by its name; the first that fits."""


def kind_of(kernel: str) -> str:
    """One of KINDS, or `other`."""
    return next((kind for kind, names in KINDS if re.search(names, kernel)), "other")


def profile(name: str, step: Callable[[], object]) -> None:
    """Prints the kernels of one step that take most of the device's time, and where it waits for the host.

    The kernels' times are of a turn in which the host's own operations are not noted; what it did in the gaps is told of a
    second turn, in which noting them slows it."""
    device = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[device]) as seen:
        step()
    events = [event for event in seen.key_averages() if event.self_device_time_total > 0]
    events.sort(key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in events)
    launches = sum(event.count for event in events)
    print(f"{name}: {total / 1e3:.1f} ms on the device in {launches:,} kernels")
    kinds: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for event in events:
        kinds[kind_of(event.key)].append((event.self_device_time_total / 1e3, event.count))
    for kind, found in sorted(kinds.items(), key=lambda item: -sum(took for took, _ in item[1])):
        print(f"  {sum(took for took, _ in found):8.2f} ms {sum(count for _, count in found):6} x  {kind}")
    print("of these, kernel by kernel")
    for event in events[:45]:
        print(f"  {event.self_device_time_total / 1e3:8.2f} ms {event.count:6} x  {event.key[:150]}")
    gaps_of(seen)
    print("the same once more, with the host's operations")
    # A trainer steps in a thread of its own.
    threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    both = [device, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=both, experimental_config=threads) as seen:
        step()
    gaps_of(seen)


GAPS = (2e3, 5e3, 2e4, 1e5, float("inf"))
"""Borders of the lengths by which gaps are told, in ns: those of a few microseconds lie between any two kernels."""


def gaps_of(seen: torch.profiler.profile) -> None:
    """Where the device had nothing to do: by length, by the kernels between which most was lost, and one by one with what
    the host did meanwhile."""
    cuda = torch.autograd.DeviceType.CUDA
    events = [
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name(), event.device_type() == cuda)
        for event in seen.profiler.kineto_results.events()
    ]
    line = sorted(event for event in events if event[3])
    host = sorted(event for event in events if not event[3])
    gaps, busy_until, before = [], line[0][0], "the release"
    for start, end, name, _ in line:
        if start > busy_until:
            gaps.append((start - busy_until, busy_until, before, name))
        if end > busy_until:
            busy_until, before = end, name
    print(f"idle between kernels: {sum(gap[0] for gap in gaps) / 1e6:.1f} ms of {(busy_until - line[0][0]) / 1e6:.1f}")
    least = 0.0
    for most in GAPS:
        found = [gap[0] for gap in gaps if least <= gap[0] < most]
        print(f"  {sum(found) / 1e6:8.2f} ms {len(found):6} x  from {least / 1e3:g} to {most / 1e3:g} us")
        least = most
    pairs: dict[tuple[str, str], list[float]] = defaultdict(list)
    for gap, _, first, second in gaps:
        pairs[first, second].append(gap)
    print("between which kernels")
    for (first, second), found in sorted(pairs.items(), key=lambda item: -sum(item[1]))[:25]:
        print(f"  {sum(found) / 1e6:8.2f} ms {len(found):6} x  {first[:70]} | {second[:70]}")
    print("the longest, and what the host did meanwhile")
    for gap, at, first, second in sorted(gaps, reverse=True)[:25]:
        print(f"  {gap / 1e6:8.2f} ms after {(at - line[0][0]) / 1e6:8.2f} ms, {first[:60]} | {second[:60]}")
        if told := meanwhile(host, at, at + gap):
            print(f"             {told}")


def meanwhile(host: list[tuple[int, int, str, bool]], begin: float, end: float) -> str:
    """The host's operations within a stretch of time, the longest shares of it first."""
    shares: dict[str, float] = defaultdict(float)
    for start, until, name, _ in host:
        if start >= end:
            break
        if until > begin:
            shares[name] += min(until, end) - max(start, begin)
    told = sorted(shares.items(), key=lambda item: -item[1])[:8]
    return ", ".join(f"{name[:50]} {share / 1e6:.2f}" for name, share in told)
