"""Where the device's time goes in a step, as torch's profiler saw it."""

from __future__ import annotations

from collections.abc import Callable

import torch


def profile(name: str, step: Callable[[], object]) -> None:
    """Prints the kernels of one step that take most of the device's time, and where it waits for the host."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        step()
    events = [event for event in seen.key_averages() if event.self_device_time_total > 0]
    events.sort(key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in events)
    launches = sum(event.count for event in events)
    print(f"{name}: {total / 1e3:.1f} ms on the device in {launches:,} kernels")
    for event in events[:45]:
        print(f"  {event.self_device_time_total / 1e3:8.2f} ms {event.count:6} x  {event.key[:150]}")
    cuda = torch.autograd.DeviceType.CUDA
    line = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        for event in seen.profiler.kineto_results.events()
        if event.device_type() == cuda
    )
    gaps, busy_until, before = [], line[0][0], "the release"
    for start, end, name in line:
        gaps.append((start - busy_until, busy_until - line[0][0], before, name))
        if end > busy_until:
            busy_until, before = end, name
    print(f"idle between kernels: {sum(max(gap[0], 0) for gap in gaps) / 1e6:.1f} ms, most of it")
    for gap, at, before, after in sorted(gaps, reverse=True)[:14]:
        print(f"  {gap / 1e6:8.2f} ms after {at / 1e6:8.2f} ms, between {before[:70]} and {after[:70]}")
