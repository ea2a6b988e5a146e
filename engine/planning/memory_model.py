"""Closed-form arithmetic over config and facts: bytes by class, from what is counted. Pure, quick, and honest about gaps.

Every function gives `None` while a fact it needs is unknown. The classes add up to the peak of one step on one device:
weights, adapter, gradients, optimizer, activations, images (of a vision tower that learns), logits (tiles and buffers of the
head, `engine.features.cut_cross_entropy`), reference (a frozen copy), generation (a process that samples beside the training, on the same
device), kept images (where the device is the host), overhead (context, fragments).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

from engine.config.facts import Facts, ModelFacts
from engine.config.kinds import BUILTIN_MODELS, reference_of
from engine.config.method import learns_from_images
from engine.config.optimizers import own_value
from engine.config.rollouts import Groups
from engine.config.tree import RunConfig
from engine.facts.counts import (
    Parameters,
    device_count,
    devices_a_node,
    known_model,
    mlp_width,
    parameters,
    products,
    sampled_together,
    shard_count,
    tokens_and_length,
)
from engine.facts.stored import PACKED
from engine.features import attention_backend, cut_cross_entropy, fp8_base, layer_offloading, packed_experts
from engine.features.feature import Layers
from engine.features.table import FEATURES

FIT = 0.92
"""Share of a device that a run may plan to fill."""
MiB = 1024**2
BYTES = {"bfloat16": 2.0, "float16": 2.0, "float32": 4.0}
# bits of a quantized weight with its scales: nf4 with double quantization 4.127, int8 with row scales 8.03
QUANTIZED = {"nf4": 4.127 / 8, "fp4": 4.127 / 8, "int8": 8.03 / 8, "mxfp4": 4.25 / 8, "nvfp4": 4.5 / 8}
# bytes of optimizer state for each byte of a trained parameter
STATES = {
    "adamw_torch_fused": 2.0, "adamw_torch": 2.0, "adafactor": 0.02, "sgd": 0.0, "adagrad": 1.0, "rmsprop": 1.0,
    "adopt": 2.0, "came": 1.01, "schedule_free_adamw": 2.0,
}  # fmt: skip
# Measured on an H100 with Qwen3 shapes of 0.6B and 1.7B (torch 2.11, transformers 5.17):
# a decoder layer keeps so many elements a token per hidden, MLP and query-key-value element,
KEPT_HIDDEN, KEPT_WIDE, KEPT_ATTENTION = 8.6, 4.0, 3.7
# a little less where the base is frozen, and more in float32, whose fused attention keeps more.
KEPT_FROZEN, KEPT_FLOAT32 = 0.87, 1.3
# A compiled layer keeps what its products and norms read: so many numbers of the hidden width, of the query's and of the
# keys', and those of its MLP's width that `engine.features.compile` says. (Counted in the tensors that are saved, torch 2.13;
# H200, 8B with LoRA, torch 2.11: 58,100 numbers a token and layer, 79,100 while it is computed again.)
FUSED_HIDDEN, FUSED_QUERY, FUSED_KEYS = 4, 3, 3
# While a layer is differentiated, so many gradients of its width and of its MLP's width are there at once.
GRADIENTS_HIDDEN, GRADIENTS_WIDE = 2, 3
# Ring attention adds up its parts in float32: so many numbers of a query's width at once, beside the row's keys and values.
RING_SUMS = 3
# While answers are sampled, so many float32 copies of the scores of their last token are there at once (measured with
# transformers 5.23 on a CPU: 5.0, and 4.5 of a model in bfloat16).
SAMPLED_SCORES = 5
# The places for keys and values of answers are a multiple of so many, where they are not told to grow token by token.
CACHE_TILE = 128
# A layer of a vision tower that is differentiated keeps so many numbers a patch: of its width, more where attention
# rotates, and of its MLP's, more where that has a gate; and the tower so many of its width beside its layers (saved tensors
# of SigLIP 7.5, 2.2 and 4, Qwen3-VL 10.5, 2.2 and 10.7, Qwen2.5-VL 12.5, 4.2 and 8.5; torch 2.13).
SEEN_HIDDEN, SEEN_ROTATED, SEEN_WIDE, SEEN_GATED = 7.5, 11.5, 2.2, 4.2
SEEN_BESIDE, SEEN_BESIDE_ROTATED = 4.0, 9.5
# An image that is kept has so many bytes a pixel and so many beside them (`engine.data.vision`).
PIXEL_BYTES, KEPT_BESIDE = 4, 1024
# The allocator reserves more than it hands out.
FRAGMENTS = 0.03
CUDA_CONTEXT = 600 * MiB
# A worker before its model is there, with torch, transformers, TRL and datasets loaded (torch 2.13 on a CPU).
CPU_PROCESS = 730 * MiB

# bytes of optimizer state for each trained number, whatever its own size (8 bits with a scale for each 256 in bitsandbytes,
# for each 32 in FlashAdamW)
STATE_BYTES = {
    "adamw_8bit": 2.04, "paged_adamw_8bit": 2.04, "lion_32bit": 4.0, "lion_8bit": 1.02, "ademamix": 12.0,
    "ademamix_8bit": 3.06, "flash_adamw": 2.125,
}  # fmt: skip
# and for each number of 16 bits, what rounding took from it
ROUNDED_OFF = {"flash_adamw": 1.0}


def memory(config: RunConfig, facts: Facts, checkpointing: bool | str) -> dict[str, int] | None:
    """Bytes by class at the peak of one step on one device; nothing while the model's shape is unknown.

    `checkpointing` is a value of `memory.gradient_checkpointing` other than `auto`; `kernels.torch_compile` counts as
    compiled where it is true alone.
    """
    model, counts = known_model(config, facts), parameters(config, facts)
    if model is None or counts is None or not model.hidden_size or not model.layers or not model.vocab_size:
        return None
    on_gpu = facts.machine is None or bool(facts.machine.gpus)
    layers = _layers(config, facts, model, checkpointing)
    weights = layers.linears + max(0, counts.base - _linear_numbers(model)) * layers.size
    weights -= packed_experts.packed_numbers(config, facts) * (layers.size - _expert_size(config, model))
    weights -= (layers_bytes(config, facts) or 0.0) * layers.on_the_host
    weights -= _saved_of_what_sees(config, facts, model)
    experts = packed_experts.numbers(model) * _expert_size(config, model)
    # A device that divides experts with others holds its part of them, and of what is trained on them.
    away = 1 - 1 / config.distributed.expert_parallel_size
    weights -= experts * away
    held = 1 - away * counts.on_experts / max(1, counts.trained)
    trained_bytes = counts.trained * trained_size(config) * held
    tokens, length = tokens_and_length(config, facts)
    kept, layer = _activations(config, facts, layers, length)
    scored = cut_cross_entropy.Head(
        tokens, model.hidden_size, model.vocab_size, layers.size, cut_cross_entropy.is_trained(config), on_gpu,
        cut_cross_entropy.room_of(config),
    )  # fmt: skip
    scores = cut_cross_entropy.head_bytes(cut_cross_entropy.path_of(config), scored)
    # The head is done before the first layer is differentiated: the larger of the two makes the peak.
    activations = kept + (layer if layers.own_pool else max(0.0, layer - scores))
    activations += packed_experts.buffer_bytes(config, facts, layers.size)
    # With fsdp2 a device holds its share of them all, and of what is computed the whole.
    devices = shard_count(config)
    beside_scores = max(0.0, layer - scores)
    together = _put_together(config, layers, weights, experts, beside_scores) if devices > 1 else 0.0
    # A share in main memory takes nothing of the device.
    here = 0.0 if devices > 1 and config.distributed.cpu_offload else 1 / devices
    copied = weights * here + together if _holds_copy(config) else 0.0
    # While answers are sampled every layer stays together.
    sampled = max(0.0, weights * (1 - here) - together) if devices > 1 else 0.0
    weights, trained_bytes = weights * here + together, trained_bytes * here
    classes = {
        "weights": weights,
        "adapter": 0.0 if config.adapter.kind == "none" else trained_bytes,
        "gradients": _gradients(config, layers, trained_bytes, activations, scores),
        "optimizer": state_bytes(config, counts) * here * held,
        "activations": activations,
        "images": _images(config, facts, model, tokens // max(1, length), checkpointing),
        "logits": scores,
        "reference": copied or (trained_bytes if _copies_adapter(config) else 0.0),
    }
    # Answers are sampled before a step, in the room that it takes afterwards; what they need beyond it is their own.
    step = classes["gradients"] + activations + scores
    cache = _sampling(config, model, length)
    classes["cache"] = max(0.0, cache + sampled - step) if cache else 0.0
    classes["generation"] = _generation(config, classes["weights"] + classes["adapter"] + cache, on_gpu)
    classes["kept images"] = 0.0 if on_gpu else kept_images(config, facts)
    overhead = FRAGMENTS * sum(classes.values()) + (CUDA_CONTEXT if on_gpu else CPU_PROCESS)
    overhead += _too_small(config, facts, counts, layers, scored, {**classes, "overhead": overhead})
    return {name: int(size) for name, size in {**classes, "overhead": overhead}.items() if size}


def _gradients(config: RunConfig, layers: Layers, trained: float, activations: float, scores: float) -> float:
    """What gradients take beside the rest: they lie in the room that activations leave, unless they are kept from one batch to
    the next, or that room is the layers' own; then they are copied out of it."""
    if layers.own_pool:
        return trained + max(0.0, trained - activations)
    if config.optim.gradient_accumulation_steps > 1:
        return trained
    return max(0.0, trained - activations - scores)


def _too_small(
    config: RunConfig,
    facts: Facts,
    counts: Parameters,
    layers: Layers,
    head: cut_cross_entropy.Head,
    classes: Mapping[str, float],
) -> float:
    """Bytes of matrices' gradients for which no activation leaves a block that is large enough, beyond what scores leave and what
    is counted: the allocator asks the driver for each block, and neither gives it to what is larger nor puts two together. (Qwen3-4B,
    2,048 tokens, H100: 36.9 GiB held, 31.4 of tensors at most; 36.3 by a model of the allocator, 33.2 where segments can grow. By that
    model 8B holds 67.6 GiB and needs 63.8, told 68.9.) Before it runs out of memory the allocator gives back what nothing is in,
    so no more than a run may fill."""
    if not head.on_gpu or shard_count(config) > 1 or layers.own_pool or config.optim.gradient_accumulation_steps > 1:
        return 0.0
    size, block = trained_size(config), layers.tokens * mlp_width(layers.model) * layers.size
    larger = sum(rows * columns * count for rows, columns, count in counts.matrices if rows * columns * size > block)
    of_scores = max(0.0, classes["logits"] - head.weight * head.trained)
    room = device_bytes(config, facts)
    left = math.inf if room is None else FIT * room - sum(classes.values())
    return max(0.0, min(left, larger * size - classes["gradients"] - of_scores))


def _images(config: RunConfig, facts: Facts, model: ModelFacts, sequences: int, checkpointing: bool | str) -> float:
    """What a vision tower that learns keeps of a batch's images for the backward pass: each row may have as many as the one
    with the most. A frozen one keeps nothing, since no gradient goes through it."""
    tower, most = model.vision, (facts.data.image_tokens if facts.data is not None else None) or 0
    if tower is None or config.model.train_vision != "all" or not learns_from_images(config.method.kind):
        return 0.0
    hidden, wide, rotary = tower.hidden_size, tower.intermediate_size, tower.rotary
    layer = (SEEN_ROTATED if rotary else SEEN_HIDDEN) * hidden + (SEEN_GATED if tower.gated else SEEN_WIDE) * wide
    again = {"selective": 7 * hidden + (1 + tower.gated) * wide, "medium": 4 * hidden}.get(str(checkpointing), hidden)
    # What is computed again is there for one layer at a time.
    kept = tower.layers * again + layer if checkpointing else tower.layers * layer
    kept += (SEEN_BESIDE_ROTATED if rotary else SEEN_BESIDE) * hidden
    return sequences * most * tower.patches * kept * BYTES[config.model.dtype]


def may_see(config: RunConfig, facts: Facts) -> bool:
    """Whether images are read, as far as is known: by what was counted, else by the first rows."""
    if not learns_from_images(config.method.kind):
        return False
    if facts.data is not None and facts.data.images is not None:
        return facts.data.images > 0
    return any(seen.images for seen in (facts.sources or {}).values())


def kept_images(config: RunConfig, facts: Facts) -> int:
    """Main memory that images may take which one training process and its loader processes keep as they were decoded; the
    former reads none where it has some of the latter."""
    if not may_see(config, facts):
        return 0
    most, data = config.data.image_cache_size * MiB, facts.data
    if data is not None and data.images and data.image_pixels:
        most = min(most, PIXEL_BYTES * data.image_pixels + KEPT_BESIDE * data.images)
    return most * max(1, config.data.dataloader_num_workers if config.data.dataloader_num_workers != "auto" else 1)


def _put_together(config: RunConfig, layers: Layers, weights: float, experts: float, beside_scores: float) -> float:
    """Bytes of the weights that FSDP2 has put together at once: of this layer and the next, or of all that were computed;
    a mixture's experts are in its layers, too. A head and embeddings that learn are there with their gradients at the end of a
    pass; a frozen head is let go of before a layer takes `beside_scores` more than its scores do."""
    if config.distributed.reshard_after_forward is False:
        return weights
    of_layers = layers.linears + experts
    two = of_layers * min(1.0, 2 / max(1, layers.model.layers or 1))
    ends = weights - of_layers
    if config.adapter.kind == "none":
        return two + ends
    # The first layers' embeddings are as large as the head, or are the head.
    head = (layers.model.vocab_size or 0) * (layers.model.hidden_size or 0) * layers.size
    return two + max(0.0, min(ends, head) - beside_scores)


def _sampling(config: RunConfig, model: ModelFacts, length: int) -> float:
    """What the answers that are sampled at once take at their last token: keys and values of all layers, one layer's
    twice while it grows by a token, and the last token's scores."""
    if config.method.rows != "prompts":
        return 0.0
    answers = config.optim.per_device_train_batch_size * sampled_together(config)
    width = (model.kv_heads or 0) * (model.head_dim or 0)
    if getattr(config.method, "cache_implementation", "dynamic") != "dynamic":
        length = math.ceil(length / CACHE_TILE) * CACHE_TILE
    cached = 2 * width * length * ((model.layers or 0) + 1) * BYTES[config.model.dtype]
    return answers * (cached + SAMPLED_SCORES * 4.0 * (model.vocab_size or 0))


def _generation(config: RunConfig, held: float, on_gpu: bool) -> float:
    """What a process takes that samples beside the training: `held`, its weights and answers, and what a process is."""
    elsewhere = getattr(config.method, "generation_device", None) is not None
    if getattr(config.method, "async_prefetch", "none") != "answers" or elsewhere:
        return 0.0
    return held + (CUDA_CONTEXT if on_gpu else CPU_PROCESS)


def state_bytes(config: RunConfig, counts: Parameters) -> float:
    """Bytes of the optimizer's states."""
    name, size = config.optim.optim, trained_size(config)
    if name in STATE_BYTES:
        return counts.trained * (STATE_BYTES[name] + (ROUNDED_OFF.get(name, 0.0) if size == 2 else 0.0))
    if name in STATES:
        return counts.trained * size * STATES[name]
    inside = sum(rows * columns * count for rows, columns, count in counts.matrices)
    held = sum(_matrix_bytes(config, rows, columns) * count for rows, columns, count in counts.matrices)
    rest = 4.0 if name == "q_galore_adamw_8bit" else size  # bitsandbytes keeps embeddings and small weights in float32
    return held + rest * STATES["adamw_torch"] * max(0, counts.trained - inside)


def _matrix_bytes(config: RunConfig, rows: int, columns: int) -> float:
    """Bytes of state for one matrix of a layer, with an optimizer that treats matrices apart."""
    name, size = config.optim.optim, trained_size(config)
    long, short = max(rows, columns), min(rows, columns)
    if name == "muon":
        return size * rows * columns
    own = partial(own_value, name, config.optim.optim_args)
    if name == "dion":
        return size * (rows * columns + short * math.ceil(float(own("rank_fraction")) * short))
    rank = min(int(own("rank")), short)
    if name == "q_galore_adamw_8bit":
        return rank * (2.04 * long + short * (float(own("proj_bits")) / 8 + 8 / 256)) + 4 * short
    basis, moments = {
        "std": (short, long), "reverse_std": (long, short), "right": (columns, rows), "left": (rows, columns),
        "full": (rows + columns, rank),
    }[own("proj_type")]  # fmt: skip
    return size * rank * (basis + 2 * moments)


def trained_size(config: RunConfig) -> float:
    """Bytes of one trained number: adapters are bfloat16 beside a bfloat16 base, unless float32 was asked for."""
    if config.adapter.kind == "none":
        return BYTES[config.model.dtype]
    return 2.0 if config.model.dtype == "bfloat16" and not config.adapter.autocast_adapter_dtype else 4.0


def _holds_copy(config: RunConfig) -> bool:
    reference = reference_of(config.method)
    return reference == "copy" or (reference == "auto" and config.adapter.kind == "none")


def _copies_adapter(config: RunConfig) -> bool:
    goes_on = config.adapter.kind == "lora" and bool(config.adapter.path)
    return goes_on and reference_of(config.method) in ("auto", "adapter_copy", "precompute")


def _layers(config: RunConfig, facts: Facts, model: ModelFacts, checkpointing: bool | str = False) -> Layers:
    """The decoder layers, by every feature that changes what they take."""
    tokens, size = tokens_and_length(config, facts)[0], BYTES[config.model.dtype]
    linears = _linear_numbers(model) * _linear_size(config, model)
    layers = Layers(model, tokens, size, checkpointing, linears, KEPT_WIDE, GRADIENTS_WIDE)
    for feature in FEATURES:
        if hasattr(feature, "memory"):
            layers = feature.memory(config, facts, layers)
    return layers


def _linear_numbers(model: ModelFacts) -> int:
    return sum(wide_in * wide_out * count for _, wide_in, wide_out, count in model.linears)


def _linear_size(config: RunConfig, model: ModelFacts) -> float:
    """Bytes of one number of the layers' linear weights, where all are held alike."""
    if model.stored in ("fp8", *PACKED) and config.adapter.kind == "lora":
        return model.stored_size or 1.0
    wide = config.model.quantization in packed_experts.EXPERTS_ALONE
    return BYTES[config.model.dtype] if wide else QUANTIZED.get(config.model.quantization, BYTES[config.model.dtype])


def _saved_of_what_sees(config: RunConfig, facts: Facts, model: ModelFacts) -> float:
    """Bytes that the linear layers of a vision tower and its projector take less than numbers of the run's format: they are
    quantized with the others, the tower's rounded to FP8, and the tower's wait on the host where layers stream."""
    size, kind, saved = BYTES[config.model.dtype], config.model.quantization, 0.0
    if config.adapter.kind != "lora":
        return saved
    few = size if kind in packed_experts.EXPERTS_ALONE else QUANTIZED.get(kind, size)
    for layers, of_the_tower in ((model.tower, True), (model.projector, False)):
        for name, wide_in, wide_out, count in layers:
            held = few
            if of_the_tower and layer_offloading.streams(config, facts):
                held = 0.0
            elif of_the_tower and kind == "fp8" and fp8_base.why_not(name, wide_out, wide_in) is None:
                held = 1.0
            saved += wide_in * wide_out * count * (size - held)
    return saved


def _expert_size(config: RunConfig, model: ModelFacts) -> float:
    """Bytes of one number of the experts."""
    kind = packed_experts.kind_of(config, model.stored)
    if kind in PACKED:
        return model.stored_size or 1.0
    return 1.0 if kind == "fp8" else QUANTIZED.get(kind, BYTES[config.model.dtype])


def layers_bytes(config: RunConfig, facts: Facts) -> float | None:
    """Bytes of the frozen weights of all decoder layers; nothing while the model's shape is unknown."""
    model, counts = known_model(config, facts), parameters(config, facts)
    if model is None or counts is None or not model.vocab_size or not model.hidden_size:
        return None
    size = _linear_size(config, model)
    if model.experts:  # fused experts are no linear layers
        held = max(0, counts.base - 2 * model.vocab_size * model.hidden_size) * size
        held += packed_experts.numbers(model) * (_expert_size(config, model) - size)
    else:
        held = _layers(config, facts, model).linears
    return max(0.0, held - counts.trained_base * size) or None


def _activations(config: RunConfig, facts: Facts, layers: Layers, length: int) -> tuple[float, float]:
    """What all layers keep for the backward pass, and what one of them needs while it is differentiated: its gradients,
    and all that it forgot where it is computed again."""
    model, tokens, size = layers.model, layers.tokens, layers.size
    hidden, count, wide = model.hidden_size or 0, model.layers or 0, mlp_width(model)
    attention = (model.head_dim or 0) * ((model.heads or 0) + 2 * (model.kv_heads or 0))
    kept_wide = layers.mlp_kept * wide
    kept = KEPT_HIDDEN * hidden + kept_wide + KEPT_ATTENTION * attention
    layer = tokens * kept * size * (KEPT_FROZEN if config.adapter.kind == "lora" else 1.0)
    if config.model.dtype == "float32":
        layer *= KEPT_FLOAT32
    of_block = layer * kept_wide / kept
    scores = tokens * length * (model.heads or 1) * (size + 4) if attention_backend.keeps_scores(config, facts) else 0
    layer += scores
    share = 1.0 if layers.at_once is None else layers.at_once
    gradients = tokens * (GRADIENTS_HIDDEN * hidden + layers.mlp_gradients * wide * share) * size
    if layers.at_once is not None:
        layer, gradients, of_block = layer - of_block, gradients + of_block * share, 0.0
    if (ring := config.distributed.context_parallel_size) > 1:
        # Attention is differentiated once the block's own is gone.
        rows = 2 * ring * (model.kv_heads or 0) * size + RING_SUMS * 4 * (model.heads or 0)
        round_it = tokens * (GRADIENTS_HIDDEN * hidden * size + (model.head_dim or 0) * rows)
        gradients = max(gradients, round_it - of_block)
    if layers.fused:
        return _fused_activations(layers, gradients, scores)
    layer += layers.beside / max(1, count)
    if layers.in_flight is not None:
        return layers.in_flight, layer + gradients
    if layers.again is None:
        return layer * count * layers.kept, gradients
    # The last layers keep everything and are differentiated first: of these one takes the room of one that is computed again.
    whole = layer * layers.kept * min(layers.left_out, count)
    kept_again = tokens * layers.again * size * max(0, count - layers.left_out)
    return kept_again + whole, gradients + max(0.0, layer - whole)


def _fused_activations(layers: Layers, gradients: float, scores: float) -> tuple[float, float]:
    """The same of compiled layers, of which each holds these bytes of attention scores. What is computed again is there while it is differentiated, but for what the tier kept; the
    last product's result is the next layer's input and is not kept twice."""
    model, wide = layers.model, mlp_width(layers.model)
    count, hidden = model.layers or 0, model.hidden_size or 0
    head = model.head_dim or 0
    narrow = FUSED_HIDDEN * hidden + head * (FUSED_QUERY * (model.heads or 0) + FUSED_KEYS * (model.kv_heads or 0))
    bytes_each = layers.tokens * layers.size
    layer = bytes_each * (narrow + layers.mlp_kept * wide) + scores + layers.beside / max(1, count)
    if layers.in_flight is not None:
        return layers.in_flight, layer + gradients
    if layers.again is None:
        return layer * count, gradients
    again = layers.again - (hidden if layers.checkpointing in ("selective", "medium") else 0)
    whole = layer * min(layers.left_out, count)
    there = scores + bytes_each * (narrow + (layers.mlp_kept + layers.mlp_gradients) * wide - (again - hidden))
    return bytes_each * again * max(0, count - layers.left_out) + whole, max(gradients, there - whole)


def layer_operations(config: RunConfig, facts: Facts) -> int | None:
    """Floating-point operations of one layer's matrix products in a forward pass of one batch."""
    model = facts.model
    if model is None or not model.hidden_size:
        return None
    weights = sum(inner * width for inner, width in products(model))
    return 2 * weights * tokens_and_length(config, facts)[0]


REST = 2 * MiB
"""Of a checkpoint, what is neither weights nor states: a small tokenizer, the cards, what a resume needs."""
TINY_REST = MiB // 8
"""The same of a built-in model, whose tokenizer has some 20 KiB."""


REPLAYED_NUMBER = 4
"""Bytes of a token's id in the replay buffer, and of each of its log-probabilities."""


def replay_bytes(config: RunConfig) -> int:
    """The most main memory that a process's replay buffer takes: prompts and answers of the longest lengths, in ids and
    log-probabilities; texts and images' references to show them are beside it. 0 without one. Each checkpoint has it once for
    each process."""
    method = config.method
    groups: int = getattr(method, "replay_buffer_size", 0)
    if not groups or not isinstance(method, Groups):
        return 0
    answers = method.num_generations * method.max_completion_length * (3 if method.beta else 2)
    return groups * REPLAYED_NUMBER * (config.data.max_length + answers)


def checkpoint_bytes(config: RunConfig, facts: Facts) -> int | None:
    """Bytes of one checkpoint: trained weights, optimizer states, and the little rest; a replay buffer at its most."""
    counts = parameters(config, facts)
    if counts is None:
        return None
    trained = counts.trained * trained_size(config) * (2 if _copies_adapter(config) else 1)
    rest = TINY_REST if config.model.name in BUILTIN_MODELS else REST
    return int(trained + state_bytes(config, counts)) + rest + device_count(config) * replay_bytes(config)


def device_bytes(config: RunConfig, facts: Facts) -> int | None:
    """Memory of the smallest card, or what each process has of the host's where training runs on the CPU."""
    if facts.machine is None:
        return None
    if facts.machine.gpus:
        return min(gpu.memory_bytes for gpu in facts.machine.gpus)
    room = facts.machine.memory_bytes
    return None if room is None else room // devices_a_node(config)
