"""What devices send each other in a step, and how long a step is by it. Pure and quick.

Bytes are exact for the strategy; how fast they go is measured for NVLink on an H100 and else assumed from published rates. What a step
takes beside its computation was fitted to four measurements of two H100 (8B LoRA under DDP and FSDP2, a mixture under DDP and
divided; `benchmarks/results.csv`, `cards_lora`, `cards_moe`, `cards_ep`): a guess for people, never a promise.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from engine.config.facts import Facts
from engine.config.tree import RunConfig, fields
from engine.facts.counts import Parameters, device_count, devices_a_node, known_model, shard_count
from engine.hardware import Gpu
from engine.planning import memory_model

NVLINK = {(7, 0): 1.10e11, (8, 0): 2.19e11, (9, 0): 3.29e11, (10, 0): 6.57e11}
"""Bytes a second between cards of one host by compute capability: the bus bandwidth of NCCL's all-reduce. 329 GB/s was measured on
two H100 at 1 GiB, 0.73 of what NVLink has in one direction; the others are 0.73 of theirs."""
LINKED = ("V100", "A100", "A800", "H100", "H200", "H800", "H20", "GH200", "B200", "B300", "GB200", "GB300")
"""Cards that are sold with NVLink, unless their name says PCIe."""
EXPORTED = {"A800": 1.46e11, "H800": 1.46e11}
"""The same of cards that are sold with fewer links than others of their kind: 200 GB/s in one direction."""
PCIE = {(7, 0): 6.5e9, (8, 0): 1.3e10, (9, 0): 2.7e10}
"""The same through the host, half of what its bus carries to one card: assumed, as data goes up and down."""
NETWORK_A_CARD, NETWORK_A_HOST = 4.0e10, 1.0e10
"""Between hosts: 400 Gbit/s a card where cards have NVLink, else 100 Gbit/s a host, each at 80 %: assumed."""
MEMORY = 0.8 * 3.35e12
"""Bytes a second of an H100's memory, in which layers that arrive are put together: read and written once."""
LAST_BUCKET = 25 << 20
"""Gradients that DistributedDataParallel sends once the backward pass is over: one bucket of torch's."""
SLOWER = 0.016
"""Share of a step in which cards wait for the slowest (8B LoRA, two H100, twice: 1.1 and 2.4 % of it)."""
COUNTED = 2.9e-3
"""Seconds in which a layer's pass waits until the host knows how many rows go to the experts of others (two H100, layers not
compiled)."""


@dataclass(frozen=True)
class Exchange:
    """What one device sends in a step in bytes, the seconds of a step by it, and how they go in words."""

    sent: float
    seconds: float
    way: str


@dataclass(frozen=True)
class _Links:
    """Bytes a second within a host and between hosts, and how many devices a host has."""

    within: float
    between: float
    devices: int
    description: str

    def around(self, several: int) -> float:
        """Of a ring of so many devices beside each other: from host to host it has all connections of a host."""
        return self.within if several <= self.devices else min(self.within, self.between * self.devices)

    def among(self, several: int) -> float:
        """Where each of so many devices sends to the others at once: from host to host each has its own share."""
        return self.within if several <= self.devices else min(self.within, self.between)


def exchange(
    config: RunConfig, facts: Facts, parameters: Parameters, batch_seconds: float, tokens: float
) -> Exchange | None:
    """Of a step whose batches are computed in so many seconds each, with so many tokens over all devices.

    None with one device, without a GPU, and where the model's shape is not known.
    """
    devices = device_count(config)
    if devices == 1 or facts.machine is None or not facts.machine.gpus:
        return None
    ways, batches = _links(config, facts.machine.gpus[0]), config.optim.gradient_accumulation_steps
    back = batch_seconds * 2 / 3
    parts = [_gradients(config, parameters, ways, back), _weights(config, facts, ways, batches)]
    parts += [part(config, facts, ways, batches, tokens / devices) for part in (_routed, _ring)]
    sent, seconds = (sum(column) for column in zip(*parts, strict=True))
    return Exchange(sent, seconds + SLOWER * batch_seconds * batches, ways.description)


def _links(config: RunConfig, gpu: Gpu) -> _Links:
    named = re.search(rf"\b({'|'.join(LINKED)})\b", gpu.name.upper())
    linked = named is not None and "PCIE" not in gpu.name.upper()
    table, devices = (NVLINK if linked else PCIE), devices_a_node(config)
    within = table[max((known for known in table if known <= gpu.capability), default=min(table))]
    within = EXPORTED.get(named[1], within) if linked and named else within
    between = NETWORK_A_CARD if linked else NETWORK_A_HOST / devices
    name = "NVLink" if linked else "PCIe"
    words = f"{name} assumed at {within / 1e9:.0f} GB/s" if devices > 1 else ""
    if config.distributed.nodes > 1:
        words += (
            (" and " if words else "") + f"{between / 1e9:.0f} GB/s a GPU between hosts" + ("" if words else " assumed")
        )
    return _Links(within, between, devices, words)


def _gradients(config: RunConfig, parameters: Parameters, ways: _Links, back: float) -> tuple[float, float]:
    """Sums of what trains, once a step: DDP's and those of replicas by a ring of all-reduces, those of shares scattered. Divided
    experts' are summed over the devices that hold the same ones."""
    devices, shards = device_count(config), shard_count(config)
    divided, size = config.distributed.expert_parallel_size, memory_model.trained_size(config)
    held, own = size * (parameters.trained - parameters.on_experts), size * parameters.on_experts
    if divided == 1:
        held, own = held + own, 0.0
    sent = (shards - 1) / shards * held
    seconds = sent / ways.around(shards)
    for several, numbers in ((devices // shards, held / shards), (devices // divided, own / divided)):
        several = max(1, several)  # fewer devices than are shared out over: a rule refuses it
        reduced = 2 * (several - 1) / several * numbers
        # Replicas of shares are on other hosts than their kin; a ring of all devices goes through each host once.
        alike = ways.around(devices) if several == devices else ways.among(devices)
        sent, seconds = sent + reduced, seconds + reduced / alike
    last = min(1.0, LAST_BUCKET / max(1.0, held + own)) * seconds
    return sent, max(seconds - back, last)


def _weights(config: RunConfig, facts: Facts, ways: _Links, batches: int) -> tuple[float, float]:
    """Layers that FSDP2 puts together for each pass. Measured they cost what they take: what passes behind the computation slows
    that down by as much."""
    shards = shard_count(config)
    if shards == 1:
        return 0.0, 0.0
    told = fields.distributed
    plain = config.with_values({told.strategy: "ddp", told.dp_replicate_size: 1, told.dp_shard_size: None})
    whole = (memory_model.memory(plain, facts, plain.memory.gradient_checkpointing) or {}).get("weights", 0)
    passes = batches * (1 if config.distributed.reshard_after_forward is False else 2)
    sent = passes * (shards - 1) / shards * whole
    return sent, sent / ways.around(shards) + passes * 2 * whole / MEMORY


def _routed(config: RunConfig, facts: Facts, ways: _Links, batches: int, tokens: float) -> tuple[float, float]:
    """Tokens that go to divided experts and come back, in the layers that have any: forward, backward, and where layers are
    computed again once more. Each goes once to each other device that holds one of its experts: of an even spread a device
    holds none of `k` with (1 - 1/d)^k."""
    divided, model = config.distributed.expert_parallel_size, known_model(config, facts)
    if divided == 1 or model is None or not model.hidden_size or not model.layers:
        return 0.0, 0.0
    mixed = range(model.layers) if model.with_experts is None else model.with_experts
    again = _again(config, model.layers)
    passes = batches * (2 * len(mixed) + sum(number < again for number in mixed))
    chosen = model.experts_per_token
    places = (divided - 1) * (1 - (1 - 1 / divided) ** chosen if chosen else 1)
    sent = passes * 2 * places * tokens * model.hidden_size * memory_model.BYTES[config.model.dtype]
    return sent, sent / ways.among(divided) + passes * COUNTED


def _ring(config: RunConfig, facts: Facts, ways: _Links, batches: int, tokens: float) -> tuple[float, float]:
    """Keys and values that go round between the devices of a row: forward, again where layers are computed again, and backward
    with their gradients. Attention hides them; the first piece of a layer is not waited for, each is there before."""
    ring, model = config.distributed.context_parallel_size, known_model(config, facts)
    if ring == 1 or model is None or not model.kv_heads or not model.head_dim or not model.layers:
        return 0.0, 0.0
    again = _again(config, model.layers)
    piece = 2 * tokens * model.kv_heads * model.head_dim * memory_model.BYTES[config.model.dtype]
    sent = batches * (3 * model.layers + again) * (ring - 1) * piece
    attention = 3 * 4 * tokens * tokens * ring * (model.heads or 0) * model.head_dim / 2
    hidden = batches * model.layers * attention / (0.5 * 9.0e14)
    return sent, max(0.0, sent / ways.around(ring) - hidden)


def _again(config: RunConfig, layers: int) -> int:
    """How many layers compute their exchange again for the backward pass."""
    first = config.memory.recompute_num_layers
    if config.memory.gradient_checkpointing not in (True, "full", "auto"):
        return 0
    return min(layers, first) if isinstance(first, int) else layers
