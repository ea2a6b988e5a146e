"""Rules about what is traded for memory: offloading needs somewhere else to go, and its price is said before launch."""

from __future__ import annotations

from collections.abc import Iterator

from engine.config import footprint
from engine.config.defaults import resolved
from engine.config.facts import Facts
from engine.config.findings import Finding, Fix, must
from engine.config.rules.registry import rule
from engine.config.tree import RunConfig, fields

DISK_BYTES_PER_SECOND = 1.5e9
"""What one local disk wrote and read, one thread, data on the disk before the call returned."""


@rule(reads=(fields.memory.activation_offloading,))
def offloading_to_the_host_needs_a_gpu(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path = fields.memory.activation_offloading.path
    if config.memory.activation_offloading == "cpu" and facts.machine is not None and not facts.machine.gpus:
        todo = "Without a GPU the activations are in the host's memory already; disk moves them out of it."
        yield must(path, "disk or empty without a GPU", "cpu", todo, fix=Fix("leave it out", unset=(path,)))


@rule(reads=(fields.memory.activation_offloading, fields.memory.gradient_checkpointing))
def offloading_moves_what_autograd_saves(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    """The tiers hold their results themselves, where no hook can move them."""
    tier, spec = config.memory.gradient_checkpointing, fields.memory.gradient_checkpointing
    if config.memory.activation_offloading and tier in ("selective", "medium"):
        todo = "What this tier keeps cannot be moved; with full only the inputs of layers are kept, and they can."
        yield must(
            spec.path, "full or false with activation_offloading", tier, todo, fix=Fix("take full", {spec.path: "full"})
        )


@rule(
    reads=(
        fields.memory.activation_offloading,
        fields.memory.gradient_checkpointing,
        fields.model.name,
        fields.data.max_length,
        fields.optim.per_device_train_batch_size,
    )
)
def offloading_to_disk_takes_time(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path = fields.memory.activation_offloading.path
    if config.memory.activation_offloading != "disk":
        return
    kept_here = config.model_copy(update={"memory": config.memory.model_copy(update={"activation_offloading": None})})
    whole = resolved(kept_here, facts)
    classes = footprint.memory(whole, facts, checkpointing=whole.memory.gradient_checkpointing)
    if classes is None or not classes.get("activations"):
        return
    moved = classes["activations"]
    seconds = 2 * moved / DISK_BYTES_PER_SECOND
    todo = (
        f"Each batch writes and reads about {footprint.size_text(moved)}, {seconds:.1f} s at 1.5 GB/s; it pays only where "
        "a batch computes longer than that. Checkpointing is nearly always the cheaper way."
    )
    yield must(path, "empty or cpu to be quick", "disk", todo, severity="warning")
