"""Rules about what is traded for memory: offloading needs somewhere else to go, tiles need something to cut, and the price
is said before launch."""

from __future__ import annotations

from collections.abc import Iterator

from engine.config import counted, footprint, speed
from engine.config.defaults import resolved
from engine.config.facts import Facts
from engine.config.findings import Finding, Fix, must, say
from engine.config.method import METHODS
from engine.config.rules.registry import rule
from engine.config.tree import RunConfig, fields

DISK_BYTES_PER_SECOND = 1.5e9
"""What one local disk wrote and read, one thread, data on the disk before the call returned."""
HOST_SHARE = 0.8
"""Share of the host's memory that locked weights may take."""
WHOLE_BATCH_MLPS = ("gpt_oss", "llama4", "llama4_text")
"""Model types whose feed-forward block returns the router's scores beside the hidden states."""


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


_LAYERS = fields.memory.layer_offloading
_LEAVE_LAYERS = Fix("leave it out", unset=(_LAYERS.path,))


def _streams(config: RunConfig, facts: Facts) -> bool:
    """Whether layers would stream: what else they need is not asked where there is no GPU."""
    return config.memory.layer_offloading and (facts.machine is None or bool(facts.machine.gpus))


@rule(reads=(_LAYERS,))
def layer_offloading_needs_a_gpu(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if config.memory.layer_offloading and facts.machine is not None and not facts.machine.gpus:
        todo = "Without a GPU the layers are in the host's memory already."
        yield must(_LAYERS.path, "false without a GPU", True, todo, fix=_LEAVE_LAYERS)


@rule(reads=(_LAYERS, fields.adapter.kind, fields.adapter.unfrozen_parameters))
def layer_offloading_needs_frozen_weights(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    unfrozen = getattr(config.adapter, "unfrozen_parameters", None)
    if _streams(config, facts) and config.adapter.kind == "none" and not unfrozen:
        todo = "Weights that are trained stay on the card, and here all are; with an adapter the layers are frozen."
        fix = Fix("train an adapter", {fields.adapter.kind.path: "lora"})
        yield must(_LAYERS.path, "false while all weights are trained", True, todo, fix=fix)


@rule(reads=(_LAYERS, fields.model.quantization))
def layer_offloading_cannot_move_int8(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if _streams(config, facts) and config.model.quantization == "int8":
        todo = "bitsandbytes takes 8-bit weights out of their layers at the first call, where they cannot be followed."
        fix = Fix("take nf4", {fields.model.quantization.path: "nf4"})
        yield must(fields.model.quantization.path, "none, nf4 or fp4 with layer_offloading", "int8", todo, fix=fix)


@rule(reads=(_LAYERS, fields.run.devices))
def layer_offloading_needs_one_device(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path, count = fields.run.devices.path, counted.device_count(config, facts)
    if _streams(config, facts) and count > 1:
        todo = "Each process would lock a copy of all layers in the host's memory, and all would share its bus."
        yield must(path, "1 with layer_offloading", count, todo, fix=Fix("take one", {path: 1}))


@rule(reads=(_LAYERS, fields.optim.bf16_full_eval, fields.model.dtype))
def layer_offloading_leaves_nothing_to_convert(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path = fields.optim.bf16_full_eval.path
    if _streams(config, facts) and config.optim.bf16_full_eval and config.model.dtype == "float32":
        todo = "A copy of all weights would have to lie on the card, where only two layers are."
        yield must(path, "false with layer_offloading", True, todo, fix=Fix("leave it out", unset=(path,)))


@rule(reads=(_LAYERS, fields.kernels.quantization_aware))
def layer_offloading_and_rounding_do_not_meet(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path, value = fields.kernels.quantization_aware.path, config.kernels.quantization_aware
    if _streams(config, facts) and value is not False:
        todo = "Layers that round rebuild their weights, which only the layer that computes has on the card."
        yield must(path, "false with layer_offloading", value, todo, fix=Fix("leave it out", unset=(path,)))


@rule(reads=(_LAYERS, fields.memory.activation_offloading, fields.memory.gradient_checkpointing))
def offloading_both_needs_checkpoints(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    spec = fields.memory.gradient_checkpointing
    both = _streams(config, facts) and config.memory.activation_offloading
    if both and resolved(config, facts).memory.gradient_checkpointing is False:
        todo = (
            "Layers that keep all they compute keep their weights among it, which would be moved out and in once more."
        )
        rule_text = "full with layer_offloading and activation_offloading"
        fix = Fix("take full", {spec.path: "full"})
        yield must(spec.path, rule_text, config.memory.gradient_checkpointing, todo, fix=fix)


@rule(reads=(_LAYERS, fields.kernels.torch_compile_options))
def layer_offloading_has_no_fixed_addresses(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path = f"{fields.kernels.torch_compile_options.path}.triton.cudagraphs"
    if _streams(config, facts) and config.kernels.torch_compile_options.get("triton.cudagraphs") is True:
        todo = "A recorded graph reads weights where they were, and streamed ones lie elsewhere each time."
        yield must(path, "false with layer_offloading", True, todo, fix=_LEAVE_LAYERS)


@rule(reads=(_LAYERS, fields.model.name, fields.model.dtype, fields.model.quantization))
def layers_fit_into_the_hosts_memory(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    room = facts.machine.memory_bytes if facts.machine is not None and facts.machine.gpus else None
    moved = footprint.layers_bytes(config, facts)
    if _streams(config, facts) and room is not None and moved is not None and moved > HOST_SHARE * room:
        todo = (
            f"{footprint.size_text(moved)} of layers would be locked in the {footprint.size_text(room)} that the host has; "
            "4-bit weights take a quarter."
        )
        fix = Fix("take 4-bit weights", {fields.model.quantization.path: "nf4"})
        yield must(_LAYERS.path, "false where the host has too little memory", True, todo, fix=fix)


@rule(
    reads=(
        _LAYERS,
        fields.model.name,
        fields.model.dtype,
        fields.model.quantization,
        fields.data.max_length,
        fields.optim.per_device_train_batch_size,
    )
)
def layer_offloading_has_its_price(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    """When it pays: a layer's way over the bus is hidden behind the computation of the layer before it, or it is not."""
    found = speed.layer_seconds(config, facts) if _streams(config, facts) else None
    if found is None:
        return
    moving, computing = found
    tokens = counted.batch_tokens(config, facts)
    even = round(tokens * moving / computing, -2)
    figures = f"the bus brings a layer in {1e3 * moving:.1f} ms, and {tokens:,} tokens compute one in {1e3 * computing:.1f} ms"
    if moving <= computing:
        yield say(_LAYERS.path, f"costs no time: {figures}.", severity="hint")
        return
    slower = speed.streaming_share(resolved(config, facts), facts) or 0.0
    sentence = (
        f"a step takes about {slower:.0%} longer: {figures}. From {even:,.0f} tokens a batch on it costs nothing."
    )
    yield say(_LAYERS.path, sentence)


@rule(reads=(_LAYERS, fields.method.kind))
def layers_come_in_for_every_token_sampled(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if _streams(config, facts) and METHODS[config.method.kind].rows == "prompts":
        todo = "Answers are sampled token by token, and each brings every layer in; 4-bit weights stay on the card."
        rule_text = f"false to be quick with {METHODS[config.method.kind].called}"
        yield must(_LAYERS.path, rule_text, True, todo, severity="warning")


_TILES, _TILE_TOKENS, _TILE_SUMS = (
    fields.memory.tiled_mlp,
    fields.memory.tiled_mlp_tokens,
    fields.memory.tiled_mlp_fp32_sums,
)


@rule(reads=(_TILES, _TILE_TOKENS, _TILE_SUMS))
def tiles_need_tiled_mlp(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    for spec in (_TILE_TOKENS, _TILE_SUMS):
        if (value := spec.value(config)) and not config.memory.tiled_mlp:
            fix = Fix("compute in tiles", {_TILES.path: True})
            yield must(spec.path, "left out while memory.tiled_mlp is false", value, "It acts on tiles alone.", fix=fix)


@rule(reads=(_TILES, _TILE_TOKENS, fields.data.max_length, fields.optim.per_device_train_batch_size))
def a_tile_is_smaller_than_a_batch(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    size, tokens = config.memory.tiled_mlp_tokens, counted.batch_tokens(config, facts)
    if config.memory.tiled_mlp and size is not None and size >= tokens:
        todo = "One tile would hold the whole batch, so nothing would be saved."
        fix = Fix("let it be chosen", unset=(_TILE_TOKENS.path,))
        yield must(_TILE_TOKENS.path, f"less than the {tokens:,} tokens of the largest batch", size, todo, fix=fix)


@rule(
    reads=(
        _TILES,
        _TILE_TOKENS,
        fields.model.name,
        fields.model.dtype,
        fields.data.max_length,
        fields.optim.per_device_train_batch_size,
        fields.memory.gradient_checkpointing,
    )
)
def tiled_mlp_has_its_price(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    """When it pays: by how much the peak falls, and what computing the blocks again takes."""
    if not config.memory.tiled_mlp:
        return
    chosen = resolved(config, facts)
    whole = chosen.model_copy(update={"memory": chosen.memory.model_copy(update={"tiled_mlp": False})})
    tier, share = chosen.memory.gradient_checkpointing, speed.tiling_share(chosen, facts)
    tiled, plain = (footprint.memory(each, facts, tier) for each in (chosen, whole))
    if share is None or not tiled or not plain:
        return
    most, least = sum(plain.values()), sum(tiled.values())
    if most - least < 0.01 * most:
        sentence = f"saves less than a hundredth of the {footprint.size_text(most)} at the peak. Leave it out."
        yield say(_TILES.path, sentence, fix=Fix("leave it out", unset=(_TILES.path,)))
        return
    price = (
        f"a step takes about {share:.0%} longer, since blocks are computed again"
        if share
        else "it costs no time beside full checkpointing, which computes the blocks again in any case"
    )
    saved = f"the peak falls from about {footprint.size_text(most)} to {footprint.size_text(least)}"
    yield say(_TILES.path, f"{saved}; {price}.", severity="hint")


@rule(reads=(_TILES, fields.kernels.torch_compile, fields.kernels.torch_compile_options))
def tiles_are_not_compiled(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path = fields.kernels.torch_compile.path
    if config.memory.tiled_mlp and resolved(config, facts).kernels.torch_compile is True:
        todo = "A tile is differentiated inside the backward pass, which torch's compiler cannot follow."
        yield must(
            path,
            "false with tiled_mlp",
            config.kernels.torch_compile,
            todo,
            fix=Fix("leave tiles out", unset=(_TILES.path,)),
        )


@rule(reads=(_TILES, fields.model.name))
def tiles_need_a_block_of_tokens_by_themselves(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    model = counted.known_model(config, facts)
    if config.memory.tiled_mlp and model is not None and model.model_type in WHOLE_BATCH_MLPS:
        todo = "Its feed-forward block returns the router's scores of all tokens, which tiles would forget."
        fix = Fix("leave it out", unset=(_TILES.path,))
        yield must(_TILES.path, f"false for the model type {model.model_type}", True, todo, fix=fix)


@rule(reads=(fields.memory.fp32_norms, fields.model.dtype))
def fp32_norms_stand_between_fewer_bits(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path = fields.memory.fp32_norms.path
    if config.memory.fp32_norms and config.model.dtype == "float32":
        todo = "All weights are float32 then, those of norms too."
        yield must(path, "false with dtype float32", True, todo, fix=Fix("leave it out", unset=(path,)))
