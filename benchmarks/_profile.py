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
    """Prints the kernels of one step that take most of the device's time, and where it waits for the host."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
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
