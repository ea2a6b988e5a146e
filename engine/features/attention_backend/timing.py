"""Which of the installed implementations is the fastest over packs like a run's, by a look of a second or two at its start.

Timed are attention alone, forward and backward, over one packed batch of the run's shape, in turns and by the card's own
clock; each is first held to torch's own over two documents, and one that fails or computes something else has no time. The
times are kept for this card, these versions and this shape (`engine.facts.attention_times`), so that later launches know
them. Nothing of the run's random numbers is used.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from engine import figures
from engine.config.facts import Facts, ModelFacts
from engine.config.tree import RunConfig
from engine.errors import first_line, visible
from engine.facts import attention_times
from engine.facts.counts import known_model
from engine.features.attention_backend import SETTING, candidates, fastest
from engine.features.attention_backend.apply import position_kwargs
from engine.features.attention_backend.backend import FAILURES, OURS, asking, differs

ROUNDS, WARM, AT_ONCE = 9, 2, 4
"""Turns of each that count, and that do not; passes of a turn, so that the host is ahead of the card."""


def decide(config: RunConfig, facts: Facts, device: torch.device) -> tuple[str, str] | None:
    """The attention to take in place of the one that the launch chose, and why; None where there is nothing to choose between, or
    where the model's heads are not known. Measured is what was not before."""
    auto = config.with_values({SETTING: "auto"})
    order, model = candidates(auto, facts), known_model(config, facts)
    name = attention_times.key(config, model, facts.data, torch.cuda.get_device_name(device))
    if len(order) < 2 or model is None or name is None:
        return None
    if set(order) <= set(known := facts.attention_times or {}):
        return fastest(order, known)
    begun = time.monotonic()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        times, problems = measure(order, model, config, attention_times.shape(config, facts.data), device)
    torch.cuda.empty_cache()
    if times:
        attention_times.keep(name, times)
    if (taken := fastest(order, times)) is None:
        return None
    why = "".join(f"; {each} left out: {reason}" for each, reason in problems.items())
    return taken[0], f"{taken[1]}, in {figures.brief(time.monotonic() - begun)}{why}"


def measure(
    names: Sequence[str], model: ModelFacts, config: RunConfig, shape: tuple[int, int], device: torch.device
) -> tuple[dict[str, float], dict[str, str]]:
    """Milliseconds both ways by name, and why others have none; `shape` is the tokens of a batch and of a document."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    heads, width = model.heads or 1, model.head_dim or 1
    shared = model.kv_heads or heads
    dtype = getattr(torch, config.model.dtype)
    q, k, v, upstream, positions = _batch((heads, shared, width), shape, dtype, device)
    ready: dict[str, Any] = {}
    problems: dict[str, str] = {}
    for name in names:
        try:
            if name in OURS:
                OURS[name].register()
            module = asking(SimpleNamespace(_attn_implementation=name), heads // shared, dtype, device)
            if (reason := differs(name, module, (heads, shared, width))) is not None:
                problems[name] = reason
                continue
            more = {**position_kwargs(name, positions), "scaling": width**-0.5, "dropout": 0.0}
            mask = more.pop("attention_mask", None)
            more.pop("position_ids")
            ready[name] = (ALL_ATTENTION_FUNCTIONS[name], module, mask, more)
        except FAILURES as problem:
            problems[name] = visible(first_line(problem))[:200] or type(problem).__name__
    seconds: dict[str, list[float]] = {name: [] for name in ready}
    for turn in range(WARM + ROUNDS):
        for name, (attend, module, mask, more) in list(ready.items()):
            try:
                taken = _both_ways(
                    lambda *x, a=attend, m=module, w=mask, o=more: a(m, *x, w, **o)[0], (q, k, v), upstream
                )
            except FAILURES as problem:
                problems[name] = visible(first_line(problem))[:200] or type(problem).__name__
                del ready[name]
                continue
            if turn >= WARM:
                seconds[name].append(taken)
    return {name: round(statistics.median(seconds[name]), 4) for name in ready}, problems


def _batch(
    sizes: tuple[int, int, int], shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Queries, keys, values [1, heads, tokens, width], as layers hand them on, what comes from above, and positions."""
    heads, shared, width = sizes
    tokens, length = shape
    generator = torch.Generator(device).manual_seed(0)

    def drawn(count: int) -> torch.Tensor:
        x = torch.randn(1, tokens, count, width, generator=generator, device=device).to(dtype)
        return x.transpose(1, 2).requires_grad_()

    upstream = torch.randn(1, tokens, heads, width, generator=generator, device=device).to(dtype)
    positions = (torch.arange(tokens, device=device) % length)[None]
    return drawn(heads), drawn(shared), drawn(shared), upstream, positions


def _both_ways(attend: Any, leaves: tuple[torch.Tensor, ...], upstream: torch.Tensor) -> float:
    """Milliseconds of one pass forward and backward."""
    clock = _Clock(upstream.device)
    with torch.enable_grad():
        for _ in range(AT_ONCE):
            torch.autograd.grad(attend(*leaves), leaves, upstream)
    return clock.milliseconds() / AT_ONCE


class _Clock:
    """The card's own time from its making on; the host's where there is no card."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            self.begun, self.done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.begun.record()
        else:
            self.at = time.perf_counter()

    def milliseconds(self) -> float:
        if self.device.type != "cuda":
            return (time.perf_counter() - self.at) * 1e3
        self.done.record()
        self.done.synchronize()
        return float(self.begun.elapsed_time(self.done))
