"""The rule that everybody waits for: does it fit, and what is the cheapest change that makes it fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from engine.config import footprint
from engine.config.defaults import FIT, resolved
from engine.config.facts import Facts
from engine.config.findings import Finding, Fix, say
from engine.config.rules.registry import rule
from engine.config.tree import RunConfig, fields


@rule(
    reads=(
        fields.model.name,
        fields.model.dtype,
        fields.model.quantization,
        fields.method.kind,
        fields.adapter.kind,
        fields.data.max_length,
        fields.optim.per_device_train_batch_size,
        fields.memory.gradient_checkpointing,
    )
)
def it_fits_into_memory(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    room = footprint.device_bytes(config, facts)
    need = needed(config, facts)
    if room is None or need is None:
        return
    on_card, processes = bool(facts.machine and facts.machine.gpus), footprint.device_count(config, facts)
    of_host = f"each of {processes} processes has" if processes > 1 else "this machine has"
    place = "the card has" if on_card else of_host
    path = fields.optim.per_device_train_batch_size.path
    if need > room:
        ways = sorted(_ways(config, facts, need), key=lambda way: way[0])
        first = next((fix for _, left, _, fix in ways if left <= room), ways[0][3] if ways else None)
        offers = " or ".join(f"{label} (-{footprint.size_text(need - left)})" for _, left, label, _ in ways[:3])
        try_it = f" Try {offers}." if offers else " Take a smaller model or a larger card."
        sentence = f"this will not fit: needs {footprint.size_text(need)}, {place} {footprint.size_text(room)}.{try_it}"
        yield say(path, sentence, severity="error" if need > 1.1 * room else "warning", fix=first)
    elif need > FIT * room:
        yield say(
            path,
            f"this may not fit: needs about {footprint.size_text(need)} of {footprint.size_text(room)}, and estimates err by a tenth.",
        )


def needed(config: RunConfig, facts: Facts) -> int | None:
    """Bytes at the peak, with `auto` resolved; nothing while the model is not known."""
    if "auto" in (config.memory.gradient_checkpointing, config.kernels.torch_compile):
        config = resolved(config, facts)
    classes = footprint.memory(config, facts, checkpointing=config.memory.gradient_checkpointing)
    return None if classes is None else sum(classes.values())


def _ways(config: RunConfig, facts: Facts, need: int) -> Iterator[tuple[int, int, str, Fix]]:
    """Single changes that save something: (lost speed as a rank, bytes left, words, fix)."""
    optim, model = config.optim, config.model
    if optim.per_device_train_batch_size > 1:
        half = optim.per_device_train_batch_size // 2
        twice = optim.gradient_accumulation_steps * optim.per_device_train_batch_size // half
        changed = config.model_copy(update={"optim": optim.model_copy(update={"per_device_train_batch_size": half})})
        changes = {
            fields.optim.per_device_train_batch_size.path: half,
            fields.optim.gradient_accumulation_steps.path: twice,
        }
        yield from _way(1, changed, facts, need, f"batches of {half}", changes)
    if config.memory.gradient_checkpointing not in (True, "full", "auto"):
        changed = config.model_copy(
            update={"memory": config.memory.model_copy(update={"gradient_checkpointing": True})}
        )
        yield from _way(3, changed, facts, need, "checkpointing", {fields.memory.gradient_checkpointing.path: True})
    if config.adapter.kind == "lora" and model.quantization == "none" and facts.machine and facts.machine.gpus:
        changed = config.model_copy(update={"model": model.model_copy(update={"quantization": "nf4"})})
        yield from _way(2, changed, facts, need, "4-bit weights", {fields.model.quantization.path: "nf4"})
    if config.adapter.kind == "lora" and not config.memory.layer_offloading and facts.machine and facts.machine.gpus:
        changed = config.model_copy(update={"memory": config.memory.model_copy(update={"layer_offloading": True})})
        words, change = "layers in the host's memory", {fields.memory.layer_offloading.path: True}
        yield from _way(5, changed, facts, need, words, change)
    if config.adapter.kind == "none":
        from engine.config.adapter import Lora

        changed = config.model_copy(update={"adapter": Lora()})
        yield from _way(4, changed, facts, need, "LoRA instead of all weights", {fields.adapter.kind.path: "lora"})


def _way(
    rank: int, changed: RunConfig, facts: Facts, need: int, label: str, changes: Mapping[str, object]
) -> Iterator[tuple[int, int, str, Fix]]:
    left = needed(changed, facts)
    if left is not None and left < 0.99 * need:
        yield rank, left, label, Fix(label, changes)
