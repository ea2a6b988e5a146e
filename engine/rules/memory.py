"""What a feature that trades time for memory costs and saves, by the memory model, and the folder that two of them share.

What a feature needs otherwise stands in its own folder; these rules ask `planning`, which lies above the features.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine import figures
from engine.config.facts import Facts
from engine.config.findings import Finding, Fix, must, notice
from engine.config.rule import leave_out, rule, take
from engine.config.tree import RunConfig, fields
from engine.facts import counts
from engine.features import layer_offloading
from engine.planning import loading, memory_model, speed
from engine.planning.auto import effective, resolved

DISK_BYTES_PER_SECOND = 1.5e9
"""What one local disk wrote and read, one thread, data on the disk before the call returned."""
HOST_SHARE = 0.8
"""Share of the host's memory that locked weights may take."""
_UNPACKED_FIRST = (".gz", ".zst", ".xz", ".bz2")
_LAYERS = fields.memory.layer_offloading
_AGAIN, _ROOM = fields.memory.recompute_num_layers, fields.kernels.cut_ce_workspace
_REPLAYED = fields.method.replay_buffer_size
_LOADERS, _KEPT = fields.data.dataloader_num_workers, fields.data.image_cache_size


@rule(reads=(_ROOM, fields.kernels.use_cut_ce))
def a_size_of_scores_needs_a_head_that_has_one(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    """What `use_cut_ce: auto` becomes decides it; one that is false by the config itself is refused by its own feature."""
    if (
        facts.machine is None
        or config.kernels.use_cut_ce != "auto"
        or not isinstance(config.kernels.cut_ce_workspace, int)
    ):
        return
    given_up = next((entry for entry in effective(config, facts) if entry.path == _ROOM.path), None)
    if given_up is not None:
        todo = f"It is {given_up.reason}. The launch leaves it empty."
        asked = f"empty or auto where {fields.kernels.use_cut_ce.path} becomes false"
        yield must(_ROOM.path, asked, given_up.requested, todo, severity="warning", fix=leave_out(_ROOM))


@rule(reads=(_AGAIN, fields.memory.gradient_checkpointing))
def layers_computed_again_are_fewer_than_all(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    asked, model = config.memory.recompute_num_layers, counts.known_model(config, facts)
    if not isinstance(asked, int) or not config.memory.gradient_checkpointing:
        return
    if model is not None and model.layers and asked >= model.layers:
        todo = f"The model has {model.layers}, and all of them are computed again anyway."
        yield must(_AGAIN.path, f"below {model.layers}", asked, todo, severity="warning", fix=leave_out(_AGAIN))
    elif facts.machine is not None and resolved(config, facts).memory.gradient_checkpointing is False:
        todo = "No layer is computed again."
        must_be = f"empty where {fields.memory.gradient_checkpointing.path} becomes false"
        yield must(_AGAIN.path, must_be, asked, todo, severity="warning", fix=leave_out(_AGAIN))


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
    whole = resolved(config.with_values({fields.memory.activation_offloading: None}), facts)
    classes = memory_model.memory(whole, facts, checkpointing=whole.memory.gradient_checkpointing)
    if classes is None or not classes.get("activations"):
        return
    moved = classes["activations"]
    seconds = 2 * moved / DISK_BYTES_PER_SECOND
    todo = (
        f"Each batch writes and reads about {figures.size(moved)}, {seconds:.1f} s at 1.5 GB/s; it pays only where "
        "a batch computes longer than that. Checkpointing is nearly always the cheaper way."
    )
    yield must(path, "empty or cpu to be quick", "disk", todo, severity="warning")


@rule(reads=(fields.memory.activation_offloading, fields.data.train, fields.data.eval))
def the_scratch_folder_is_of_use(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    """$WORKBENCH_SCRATCH is written to by offloading to disk and by rows that are unpacked first."""
    packed = [entry.path for entry in (*config.data.train, *config.data.eval) if entry.path.endswith(_UNPACKED_FIRST)]
    path = fields.memory.activation_offloading.path
    if facts.scratch and (packed or config.memory.activation_offloading == "disk"):
        todo = "Let it name a folder that you can write to, or unset it."
        yield notice(
            path if config.memory.activation_offloading == "disk" else fields.data.train.path,
            f"WORKBENCH_SCRATCH names a folder that cannot be used: {facts.scratch}. {todo}",
            severity="error",
        )


@rule(reads=(_LAYERS, fields.memory.activation_offloading, fields.memory.gradient_checkpointing))
def offloading_both_needs_checkpoints(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    spec = fields.memory.gradient_checkpointing
    both = layer_offloading.streams(config, facts) and config.memory.activation_offloading
    if both and resolved(config, facts).memory.gradient_checkpointing is False:
        todo = (
            "Layers that keep all they compute keep their weights among it, which would be moved out and in once more."
        )
        rule_text = "full with layer_offloading and activation_offloading"
        fix = Fix("take full", {spec.path: "full"})
        yield must(spec.path, rule_text, config.memory.gradient_checkpointing, todo, fix=fix)


@rule(reads=(_LOADERS, fields.data.dataloader_prefetch_factor, fields.optim.per_device_train_batch_size))
def waiting_batches_fit_into_shared_memory(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    """A process that finds no room there is killed in the middle of a batch."""
    asked, machine = config.data.dataloader_num_workers, facts.machine
    room = machine.shared_memory_bytes if machine is not None else None
    if asked == "auto" or not asked or room is None:
        return
    if (need := loading.all_waiting_bytes(config, facts, asked)) > room:
        todo = (
            f"Batches of images that wait may take {figures.size(need)} of shared memory, and /dev/shm has {figures.size(room)}. "
            "Take fewer processes, or give a container more (--shm-size)."
        )
        fix = Fix("let it be chosen", unset=(_LOADERS.path,))
        yield must(_LOADERS.path, "fewer on this machine", asked, todo, severity="warning", fix=fix)


@rule(reads=(_LOADERS, _KEPT))
def kept_images_fit_into_main_memory(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    room = facts.machine.memory_bytes if facts.machine is not None else None
    processes = counts.devices_a_node(config)
    need = processes * memory_model.kept_images(resolved(config, facts), facts)
    if room is not None and need > HOST_SHARE * room:
        todo = (
            f"Images that are kept may take {figures.size(need)}, that much in each loader process, "
            f"and this machine has {figures.size(room)}."
        )
        yield must(_KEPT.path, "less", config.data.image_cache_size, todo, severity="warning")


@rule(
    reads=(
        _REPLAYED,
        fields.method.num_generations,
        fields.method.max_completion_length,
        fields.method.beta,
        fields.data.max_length,
    )
)
def replayed_groups_fit_into_main_memory(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    room = facts.machine.memory_bytes if facts.machine is not None else None
    each, processes = memory_model.replay_bytes(config), counts.devices_a_node(config)
    if room is None or processes * each <= HOST_SHARE * room:
        return
    groups = _REPLAYED.value(config)
    fitting = max(1, int(HOST_SHARE * room / processes * groups / each))
    todo = (
        f"Groups of the longest answers would take {figures.size(processes * each)} of main memory, and this machine has "
        f"{figures.size(room)}. Each checkpoint would have as much."
    )
    yield must(_REPLAYED.path, f"at most {fitting:,}", groups, todo, severity="warning", fix=take(_REPLAYED, fitting))


@rule(reads=(_LAYERS, fields.model.name, fields.model.dtype, fields.model.quantization))
def layers_fit_into_the_hosts_memory(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    room = facts.machine.memory_bytes if facts.machine is not None and facts.machine.gpus else None
    moved = memory_model.layers_bytes(config, facts)
    if layer_offloading.streams(config, facts) and room is not None and moved is not None and moved > HOST_SHARE * room:
        todo = (
            f"{figures.size(moved)} of layers would be locked in the {figures.size(room)} that the host has; "
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
    seconds = speed.layer_seconds(config, facts) if layer_offloading.streams(config, facts) else None
    if seconds is None:
        return
    moving, computing = seconds
    tokens = counts.batch_tokens(config, facts)
    even = round(tokens * moving / computing, -2)
    figures = f"the bus brings a layer in {1e3 * moving:.1f} ms, and {tokens:,} tokens compute one in {1e3 * computing:.1f} ms"
    if moving <= computing:
        yield notice(_LAYERS.path, f"costs no time: {figures}.", severity="hint")
        return
    slower = speed.streaming_share(resolved(config, facts), facts) or 0.0
    sentence = (
        f"a step takes about {slower:.0%} longer: {figures}. From {even:,.0f} tokens a batch on it costs nothing."
    )
    yield notice(_LAYERS.path, sentence)


_TILES, _TILE_TOKENS, _TILE_SUMS = (
    fields.memory.tiled_mlp,
    fields.memory.tiled_mlp_tokens,
    fields.memory.tiled_mlp_fp32_sums,
)


@rule(
    reads=(
        _TILES,
        _TILE_SUMS,
        fields.model.dtype,
        fields.adapter.kind,
        fields.adapter.autocast_adapter_dtype,
        fields.adapter.bias,
        fields.adapter.modules_to_save,
    )
)
def sums_in_float32_need_weights_of_fewer_bits(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path, adapter = _TILE_SUMS.path, config.adapter
    if not (config.memory.tiled_mlp and config.memory.tiled_mlp_fp32_sums):
        return
    todo = "The gradients of the tiles are added in that format anyway."
    if config.model.dtype == "float32":
        yield must(path, "false with dtype float32", True, todo, fix=Fix("leave it out", unset=(path,)))
    elif (
        adapter.kind == "lora"
        and adapter.bias == "none"
        and not adapter.modules_to_save
        and memory_model.trained_size(config) == 4.0
    ):
        yield must(path, "false with a float32 adapter", True, todo, fix=Fix("leave it out", unset=(path,)))


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
    whole = chosen.with_values({fields.memory.tiled_mlp: False})
    tier, share = chosen.memory.gradient_checkpointing, speed.tiling_share(chosen, facts)
    tiled, plain = (memory_model.memory(either, facts, tier) for either in (chosen, whole))
    if share is None or not tiled or not plain:
        return
    most, least = sum(plain.values()), sum(tiled.values())
    if most - least < 0.01 * most:
        sentence = f"saves less than a hundredth of the {figures.size(most)} at the peak. Leave it out."
        yield notice(_TILES.path, sentence, fix=Fix("leave it out", unset=(_TILES.path,)))
        return
    price = (
        f"a step takes about {share:.0%} longer, since blocks are computed again"
        if share
        else "it costs no time beside full checkpointing, which computes the blocks again in any case"
    )
    saved = f"the peak falls from about {figures.size(most)} to {figures.size(least)}"
    yield notice(_TILES.path, f"{saved}; {price}.", severity="hint")
