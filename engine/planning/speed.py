"""How fast cards compute and their buses carry, and what streaming layers and tiles cost. Pure and quick.

A batch's time is told by steps that were measured on such a card; else by those of another card and the published speeds of
both; else by published speeds alone: a guess for people, never a promise. Every function gives `None` while a fact it needs is
unknown.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import lru_cache
from typing import Any

from engine.config.facts import Facts, StepTime
from engine.config.kinds import reference_of
from engine.config.tree import RunConfig
from engine.facts import step_speeds, step_times
from engine.facts.counts import Parameters, batch_tokens, device_count, known_model
from engine.features import attention_backend
from engine.hardware import TAKEN_FOR, is_unknown
from engine.planning.memory_model import layer_operations, layers_bytes, may_see

# dense bfloat16 throughput by compute capability, in FLOP/s, as published for the usual card
PEAK = {
    (7, 0): 1.1e14, (7, 5): 6.5e13, (8, 0): 3.1e14, (8, 6): 1.2e14, (8, 9): 1.8e14, (9, 0): 9.0e14, (10, 0): 2.0e15,
    (10, 3): 2.2e15, (12, 0): 2.1e14,
}  # fmt: skip
# bytes a second of a card's own memory, as published for the usual card
BANDWIDTH = {
    (7, 0): 9.0e11, (7, 5): 3.2e11, (8, 0): 2.0e12, (8, 6): 7.7e11, (8, 9): 8.6e11, (9, 0): 3.35e12, (10, 0): 8.0e12,
    (10, 3): 8.0e12, (12, 0): 1.8e12,
}  # fmt: skip
# and both where a word of the card's name says another than the usual one
NAMED = {
    "H100": (9.0e14, 3.35e12), "H200": (9.0e14, 4.8e12), "GH200": (9.0e14, 4.0e12), "H20": (1.5e14, 4.0e12), "A10": (1.25e14, 6.0e11), "A10G": (7.0e13, 6.0e11),
    "3090": (7.1e13, 9.4e11), "L4": (1.2e14, 3.0e11), "L40S": (3.6e14, 8.6e11), "4090": (1.65e14, 1.0e12),
}  # fmt: skip
# Bytes a second from locked host memory to the usual card of a compute capability: PCIe of generation 3, 4 and 5, at 85 %
# of their rate. 55 GB/s was measured on an H100.
BUS = {(7, 0): 1.3e10, (8, 0): 2.6e10, (9, 0): 5.5e10}
REACH = {False: 0.38, True: 0.61}
"""Share of the peak that a layer with adapters reaches, as it is and compiled (8B shape, 16,384 tokens, H200: 18.3 and
11.5 ms for 6.3e12 operations). Its products alone reach 0.88, so a faster layer is still to come."""

_MFU = 0.30
"""Share of the peak that a plain run reaches, for a first guess at the time."""
_CARD_LAYER = 3.5e-3
"""Seconds that a host takes to launch one layer's forward and backward pass, which a small model waits for (0.6B, 28 layers,
H100: 105 ms a step)."""
_AGAIN: dict[Any, float] = {False: 0.0, "selective": 0.0, "medium": 1.0}
"""Operations a parameter and token that checkpointing computes again: all of the forward pass, or a share of it."""


def operations(config: RunConfig, layers: int | None = None) -> float:
    """Floating-point operations a parameter and token: 6, 8 with checkpointing of all the model's layers, a third less for a
    frozen base."""
    again = _AGAIN.get(config.memory.gradient_checkpointing, 2.0)
    if layers and isinstance(config.memory.recompute_num_layers, int):
        again *= min(1.0, config.memory.recompute_num_layers / layers)
    count = (4.0 if config.adapter.kind == "lora" else 6.0) + again
    return count + beside(config)


def beside(config: RunConfig) -> float:
    """Operations a parameter and token of passes without gradients: 2 of a reference that is not computed ahead, and 4 of
    KTO's mismatched rows, which model and reference answer (arXiv:2402.01306)."""
    reference = reference_of(config.method)
    count = 0.0 if reference in (None, "precompute") else 2.0
    return count + (4.0 if count and getattr(config.method, "loss_type", "") == "kto" else 0.0)


def published(card: str, capability: tuple[int, int] = (0, 0)) -> tuple[float, float] | None:
    """Operations of 16 bits and bytes of its own memory that a card takes a second, as published; None for one that is not
    known by its name or compute capability."""
    for word in card.replace("-", " ").split():
        if (named := NAMED.get(word.removeprefix("RTX"))) is not None:
            return named
    usual = max((known for known in PEAK if known <= capability), default=None)
    return None if usual is None else (PEAK[usual], BANDWIDTH[usual])


def card_batch_seconds(config: RunConfig, facts: Facts, parameters: Parameters, tokens: float) -> float | None:
    """How long cards compute one batch of so many tokens over all of them: by batches that were measured on a card like
    theirs or another, else a first guess, which is no less than what the host takes to launch the layers."""
    if facts.machine is None or not facts.machine.gpus:
        return None
    longer = 1 + (streaming_share(config, facts) or 0.0)
    devices = device_count(config)
    if (measured := _told_seconds(config, facts, parameters, tokens / devices)) is not None:
        return _streamed(config, facts, measured)
    capability = facts.machine.gpus[0].capability
    if capability < min(PEAK):
        return None
    rate = PEAK[max(known for known in PEAK if known <= capability)] * _MFU * devices
    if config.model.dtype == "float32":
        rate /= 2 if config.optim.tf32 else 8
    layers = facts.model.layers if facts.model else None
    launches = _CARD_LAYER * (layers or 0)
    return max(operations(config, layers) * parameters.base * tokens * longer / rate, launches)


def time_source(config: RunConfig, facts: Facts, parameters: Parameters, tokens: float) -> str:
    """What the time of a batch of so many tokens over all cards is told by: steps that were measured on such a card, those of
    another, or its published speed alone; empty without a card."""
    if facts.machine is None or not facts.machine.gpus:
        return ""
    name = facts.machine.gpus[0].name
    asked = _batch_of(config, facts, parameters, tokens / device_count(config))
    few = len(facts.step_times) < step_times.FEWEST
    if asked is None or _speeds(facts) is None or (few and len(facts.shipped_times) < step_times.FEWEST):
        whose = f"{TAKEN_FOR}, which {name} is taken for" if is_unknown(facts.machine.gpus[0]) else name
        return f"by the published speed of {whose}; no steps like these were measured on it"
    if few:
        other = facts.shipped_times[0].card
        if is_unknown(facts.machine.gpus[0]):
            return f"by steps measured on {other} and the published speeds of it and {TAKEN_FOR}, which {name} is taken for"
        return f"by steps measured on {other} and the published speeds of both; none were measured on {name}"
    card = facts.step_times[0].card
    alike = any(
        (row.weights, row.held, row.compiled) == (asked.weights, asked.held, asked.compiled) for row in facts.step_times
    )
    return f"by steps measured on {card}" if alike else f"by steps of other kinds measured on {card}"


def _told_seconds(config: RunConfig, facts: Facts, parameters: Parameters, tokens: float) -> float | None:
    """By what batches took on a card like this one, or on another; None where neither is known."""
    asked, speeds = _batch_of(config, facts, parameters, tokens), _speeds(facts)
    if asked is None or speeds is None:
        return None
    return step_speeds.seconds(speeds, step_speeds.terms(asked))


def _streamed(config: RunConfig, facts: Facts, seconds: float) -> float:
    """The same batch where its layers' weights come over the bus, once for each pass."""
    one = layer_seconds(config, facts) if config.memory.layer_offloading else None
    if one is None or facts.model is None or not facts.model.layers:
        return seconds
    forward = seconds * 2 / operations(config, facts.model.layers)
    return sum(max(each, one[0] * facts.model.layers) for each in (forward, seconds - forward))


def _batch_of(config: RunConfig, facts: Facts, parameters: Parameters, tokens: float) -> StepTime | None:
    sequences = config.optim.per_device_train_batch_size * (2 if config.method.rows in ("pairs", "texts") else 1)
    tokens *= padded(config, facts, sequences)
    asked = step_times.step_of(config, facts, tokens, tokens / max(1, sequences), parameters.base)
    heads = (facts.model.heads or 0) if facts.model and attention_backend.keeps_scores(config, facts) else 0
    seeing, seen = _seen(config, facts, tokens)
    return asked and replace(asked, reference=beside(config), scores=heads, seeing=seeing, seen=seen)


def _seen(config: RunConfig, facts: Facts, tokens: float) -> tuple[int, int]:
    """Layers of the vision tower, and its weights times the patches of a batch's images, half of them where it is frozen, which
    has no backward pass; nothing where rows have none."""
    model, data = facts.model, facts.data
    if model is None or model.vision is None or data is None or not data.images or not data.tokens:
        return 0, 0
    if not may_see(config, facts):
        return 0, 0
    patches = tokens * (data.all_image_tokens or 0) / data.tokens * model.vision.patches
    weights = sum(wide_in * wide_out * count for _, wide_in, wide_out, count in model.tower)
    return model.vision.layers, round(weights * patches * (1.0 if config.model.train_vision == "all" else 0.5))


def padded(config: RunConfig, facts: Facts, sequences: int) -> float:
    """How many tokens are computed for each that is no padding: batches of so many rows are as long as their longest, which is
    told by the lengths that were counted; 1 for packs, and while none were."""
    data = facts.data
    if config.data.packing or sequences < 2 or data is None or not data.lengths:
        return 1.0
    return _longest(data.lengths, config.data.max_length, sequences)


@lru_cache(maxsize=64)
def _longest(lengths: tuple[int, ...], limit: int, sequences: int) -> float:
    """The longest of so many rows that are drawn from these, over the mean of all."""
    cut = sorted(min(each, limit) for each in lengths)
    below = [(at / len(cut)) ** sequences for at in range(len(cut) + 1)]
    longest = sum(length * (below[at + 1] - below[at]) for at, length in enumerate(cut))
    return max(1.0, longest * len(cut) / max(1, sum(cut)))


def _speeds(facts: Facts) -> step_speeds.Speeds | None:
    """The numbers of the machine's first card: fitted to its own rows where there are any."""
    gpu = facts.machine.gpus[0] if facts.machine and facts.machine.gpus else None
    here = published(gpu.name, gpu.capability) if gpu else None
    return None if here is None else speeds_by(facts.step_times, facts.shipped_times, here)


@lru_cache(maxsize=16)
def speeds_by(
    rows: tuple[StepTime, ...], shipped: tuple[StepTime, ...], here: tuple[float, float]
) -> step_speeds.Speeds:
    """What a card of these published speeds takes, by its rows. What they do not say is as on the shipped cards, each of them
    fitted from the one before it, scaled by published speeds; without these it is what is published."""
    known, of = None, here
    for card, group in itertools.groupby(shipped, lambda row: row.card):
        of_card, there = tuple(group), published(card)
        if there is not None and len(of_card) >= step_times.FEWEST:
            known, of = step_speeds.fitted(of_card, _from(known, of, there)), there
            rows = () if rows == of_card else rows
    expected = _from(known, of, here)
    return expected if len(rows) < step_times.FEWEST else step_speeds.fitted(rows, expected)


def _from(known: step_speeds.Speeds | None, of: tuple[float, float], here: tuple[float, float]) -> step_speeds.Speeds:
    """The numbers of a card of these published speeds, by those of another."""
    if known is None:
        return step_speeds.published(*here)
    return step_speeds.scaled(known, here[0] / of[0], here[1] / of[1])


def layer_seconds(config: RunConfig, facts: Facts) -> tuple[float, float] | None:
    """How long the bus takes for one layer's frozen weights, and the card for the layer's forward pass."""
    model, moved, operations = known_model(config, facts), layers_bytes(config, facts), layer_operations(config, facts)
    if model is None or not model.layers or not moved or not operations or not facts.machine or not facts.machine.gpus:
        return None
    capability = min(gpu.capability for gpu in facts.machine.gpus)
    if capability < min(PEAK):
        return None
    speed, bus = (table[max(known for known in table if known <= capability)] for table in (PEAK, BUS))
    return moved / model.layers / bus, operations / (REACH[config.kernels.torch_compile is True] * speed)


def streaming_share(config: RunConfig, facts: Facts) -> float | None:
    """How much longer a step takes because layers stream, as a share of it: what the bus takes beyond the computation,
    forward and backward. A backward pass that computes its layer again takes twice as long as a forward pass."""
    seconds = layer_seconds(config, facts) if config.memory.layer_offloading else None
    if seconds is None:
        return None
    moving, computing = seconds
    back = computing * (2 if config.memory.gradient_checkpointing in (True, "full", "auto") else 1)
    return (max(moving, computing) + max(moving, back)) / (computing + back) - 1


def tiling_share(config: RunConfig, facts: Facts) -> float | None:
    """How much longer a step takes because feed-forward blocks run in tiles, as a share of its layers' products.

    A tile's first two products are computed again; where full checkpointing computes whole layers again it leaves the
    blocks to the tiles. Backward passes take one product for the input's gradient and one for each weight that trains.
    Nothing is said of mixtures of experts, whose shape is not known.
    """
    model, operations = known_model(config, facts), layer_operations(config, facts)
    if model is None or not operations or model.experts:
        return None
    tier = config.memory.gradient_checkpointing
    if tier in (True, "full"):
        return 0.0
    hidden = model.hidden_size or 0
    again = 2 * 2 * hidden * (model.intermediate_size or 4 * hidden) * batch_tokens(config, facts)
    return again / (operations * (2 if config.adapter.kind == "lora" else 3))
