"""The rule that everybody waits for: does it fit, and what is the cheapest change that makes it fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from engine import figures
from engine.config.facts import Facts
from engine.config.findings import Finding, Fix, notice
from engine.config.rule import RULES, rule
from engine.config.tree import RunConfig, fields
from engine.facts import counts
from engine.facts.smaller_batch import smaller_batch
from engine.planning import memory_model
from engine.planning.auto import FIT, resolved


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
        fields.distributed.strategy,
    )
)
def it_fits_into_memory(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    room = memory_model.device_bytes(config, facts)
    need = needed(config, facts)
    if room is None or need is None:
        return
    on_card, processes = bool(facts.machine and facts.machine.gpus), counts.devices_a_node(config)
    of_host = f"each of {processes} processes has" if processes > 1 else "this machine has"
    place = "the card has" if on_card else of_host
    path = fields.optim.per_device_train_batch_size.path
    if need > room:
        ways = [way for way in _ways(config, facts, need) if _allowed(way[3], way[4], config, facts)]
        ways.sort(key=lambda way: way[0])
        first = next((fix for _, left, _, fix, _ in ways if left <= room), ways[0][3] if ways else None)
        offers = " or ".join(f"{label} (-{figures.size(need - left)})" for _, left, label, _, _ in ways[:3])
        try_it = f" Try {offers}." if offers else " Take a smaller model or a larger card."
        sentence = f"this will not fit: needs {figures.size(need)}, {place} {figures.size(room)}.{try_it}"
        yield notice(path, sentence, severity="error" if need > 1.1 * room else "warning", fix=first)
    elif need > FIT * room:
        yield notice(
            path,
            f"this may not fit: needs about {figures.size(need)} of {figures.size(room)}, and estimates err by a tenth.",
        )


def needed(config: RunConfig, facts: Facts) -> int | None:
    """Bytes at the peak, with `auto` resolved; nothing while the model is not known."""
    choices = config.memory.gradient_checkpointing, config.kernels.torch_compile, config.distributed.strategy
    if "auto" in choices:
        config = resolved(config, facts)
    classes = memory_model.memory(config, facts, checkpointing=config.memory.gradient_checkpointing)
    return None if classes is None else sum(classes.values())


Way = tuple[int, int, str, Fix, RunConfig]
"""What it costs as a rank (numbers change least first, then speed), bytes left, words, fix, and the config with it."""


def _allowed(fix: Fix, changed: RunConfig, config: RunConfig, facts: Facts) -> bool:
    """Whether no rule about what the fix sets refuses the changed config where it did not refuse it before."""

    def found(config: RunConfig) -> set[tuple[str, str]]:
        return {
            (entered.name, finding.path)
            for entered in RULES
            if entered.check is not it_fits_into_memory and not entered.places.isdisjoint(fix.set)
            for finding in entered.check(config, facts)
            if finding.severity == "error"
        }

    return found(changed) <= found(config)


def _ways(config: RunConfig, facts: Facts, need: int) -> Iterator[Way]:
    """Single changes that save something."""
    yield from _without_speedups(config, facts, need)
    optim, model, memory, adapted = config.optim, config.model, config.memory, config.adapter.kind == "lora"
    if optim.per_device_train_batch_size > 1:
        fewer, more = smaller_batch(optim.per_device_train_batch_size, optim.gradient_accumulation_steps)
        sizes = {fields.optim.per_device_train_batch_size: fewer, fields.optim.gradient_accumulation_steps: more}
        changes = {spec.path: each for spec, each in sizes.items()}
        yield from _way(1, config.with_values(sizes), facts, need, f"batches of {fewer}", changes)
    if adapted and model.quantization == "none" and facts.machine and facts.machine.gpus:
        for rank, kind, words in ((2, "fp8", "FP8 weights"), (3, "nf4", "4-bit weights")):
            changed = config.with_values({fields.model.quantization: kind})
            # FP8 comes first where layers are compiled: quicker than bfloat16 there, slower elsewhere. It rounds less.
            if kind == "fp8" and resolved(changed, facts).kernels.torch_compile is False:
                continue
            yield from _way(rank, changed, facts, need, words, {fields.model.quantization.path: kind})
    if memory.gradient_checkpointing not in (True, "full", "auto"):
        changed = config.with_values({fields.memory.gradient_checkpointing: True})
        yield from _way(4, changed, facts, need, "checkpointing", {fields.memory.gradient_checkpointing.path: True})
    if not adapted:
        from engine.config.adapter import Lora

        changed = config.model_copy(update={"adapter": Lora()})
        yield from _way(5, changed, facts, need, "LoRA instead of all weights", {fields.adapter.kind.path: "lora"})
    if adapted and not memory.layer_offloading and facts.machine and facts.machine.gpus:
        changed = config.with_values({fields.memory.layer_offloading: True})
        words, change = "layers in the host's memory", {fields.memory.layer_offloading.path: True}
        yield from _way(6, changed, facts, need, words, change)


def _without_speedups(config: RunConfig, facts: Facts, need: int) -> Iterator[Way]:
    """Memory that was given away for speed: without it the same is learned."""
    for spec, words in (
        (fields.memory.recompute_num_layers, "all layers computed again"),
        (fields.kernels.cut_ce_workspace, "the usual size for scores"),
    ):
        if isinstance(spec.value(config), int):
            yield from _way(0, config.with_values({spec: None}), facts, need, words, {spec.path: None})


def _way(
    rank: int, changed: RunConfig, facts: Facts, need: int, label: str, changes: Mapping[str, object]
) -> Iterator[Way]:
    left = needed(changed, facts)
    if left is not None and left < 0.99 * need:
        yield rank, left, label, Fix(label, changes), changed
