"""Closed-form arithmetic over config and facts: bytes by class, from what is counted. Pure, quick, and honest about gaps.

Every function gives `None` while a fact it needs is unknown. The classes add up to the peak of one step on one device:
weights, adapter, gradients, optimizer, activations, logits (tiles and buffers of the head, `engine.config.head`),
reference (a frozen copy), overhead (context, fragments).
"""

from __future__ import annotations

import math
from functools import partial

from engine.config import fp8, head
from engine.config.counted import (
    Parameters,
    batch_tokens,
    device_count,
    known_model,
    parameters,
    sampled_together,
    tokens_and_length,
)
from engine.config.facts import Facts, ModelFacts
from engine.config.kinds import reference_of
from engine.config.method import METHODS
from engine.config.optimizers import own_value
from engine.config.tree import RunConfig

MiB = 1024**2
GiB = 1024**3
BYTES = {"bfloat16": 2.0, "float16": 2.0, "float32": 4.0}
# bits of a quantized weight with its scales: nf4 with double quantization 4.127, int8 with row scales 8.03
QUANTIZED = {"nf4": 4.127 / 8, "fp4": 4.127 / 8, "int8": 8.03 / 8}
# a row's scale of a weight in FP8, in bytes
FP8_SCALE = 4
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
# LoRA in closed form keeps gate and up of a gated block, and nothing that follows from them: so many wide elements less
# (counted on a CPU; an 8B step with checkpointing took 0.5 GiB less on an H200, where two are 0.38).
CLOSED_FORM_WIDE = 2.0
# Compiled layers keep less where nothing is computed again: 0.74 of it for LoRA on an 8B and on a 0.6B shape, on an H200.
KEPT_COMPILED = 0.75
# Rounding to int8 keeps the rounded weight, so many bytes more where it is trained, and so many bytes a number of input.
ROUNDED_TRAINED, ROUNDED_INPUT = 4, 5
# While a layer is differentiated, so many gradients of its width and of its MLP's width are there at once.
GRADIENTS_HIDDEN, GRADIENTS_WIDE = 2, 3
# While answers are sampled, so many float32 copies of the scores of their last token are there at once (measured with
# transformers 5.23 on a CPU: 5.0, and 4.5 of a model in bfloat16).
SAMPLED_SCORES = 5
# The allocator reserves more than it hands out.
FRAGMENTS = 0.02
CUDA_CONTEXT = 600 * MiB
# A worker before its model is there, with torch, transformers, TRL and datasets loaded (torch 2.13 on a CPU).
CPU_PROCESS = 730 * MiB
TILE_TOKENS = 32_768
# Offloaded activations wait in so many tensors until their copy is done (TRL: max_fwd_stash_size).
OFFLOAD_IN_FLIGHT = 5


# bytes of optimizer state for each trained number, whatever its own size (bitsandbytes; 8 bits with scales a block of 256)
STATE_BYTES = {
    "adamw_8bit": 2.04, "paged_adamw_8bit": 2.04, "lion_32bit": 4.0, "lion_8bit": 1.02, "ademamix": 12.0,
    "ademamix_8bit": 3.06,
}  # fmt: skip


def size_text(size: float) -> str:
    """Bytes for people: `12.6 GiB`, `40 MiB`."""
    return f"{size / GiB:.1f} GiB" if size >= 0.95 * GiB else f"{size / MiB:.0f} MiB"


def memory(config: RunConfig, facts: Facts, checkpointing: bool | str) -> dict[str, int] | None:
    """Bytes by class at the peak of one step on one device; nothing while the model's shape is unknown.

    `checkpointing` is a value of `memory.gradient_checkpointing` other than `auto`; `kernels.torch_compile` counts as
    compiled where it is true alone.
    """
    model, counts = known_model(config, facts), parameters(config, facts)
    if model is None or counts is None or not model.hidden_size or not model.layers or not model.vocab_size:
        return None
    on_gpu = facts.machine is None or bool(facts.machine.gpus)
    weights = _weights(config, model, counts) - _weights_on_the_host(config, facts)
    trained_bytes = counts.trained * trained_size(config)
    tokens, length = tokens_and_length(config, facts)
    kept, layer = _activations(config, facts, model, tokens, length, checkpointing)
    size = BYTES[config.model.dtype]
    scored = head.Head(tokens, model.hidden_size, model.vocab_size, size, head.is_trained(config), on_gpu)
    scores = head.head_bytes(head.path_of(config), scored)
    # The head is done before the first layer is differentiated: the larger of the two makes the peak.
    activations = kept + max(0.0, layer - scores)
    # Gradients take the room that activations leave, unless they are kept from one batch to the next.
    stay = config.optim.gradient_accumulation_steps > 1
    classes = {
        "weights": weights,
        "adapter": 0.0 if config.adapter.kind == "none" else trained_bytes,
        "gradients": trained_bytes if stay else max(0.0, trained_bytes - activations - scores),
        "optimizer": state_bytes(config, counts),
        "activations": activations,
        "logits": scores,
        "reference": weights if _holds_copy(config) else 0.0,
    }
    # Answers are sampled before a step, in the room that it takes afterwards; what they need beyond it is their own.
    step = classes["gradients"] + activations + scores
    classes["cache"] = max(0.0, _sampling(config, model, length) - step)
    overhead = FRAGMENTS * sum(classes.values()) + (CUDA_CONTEXT if on_gpu else CPU_PROCESS)
    return {name: int(size) for name, size in {**classes, "overhead": overhead}.items() if size}


def _sampling(config: RunConfig, model: ModelFacts, length: int) -> float:
    """What the answers that are sampled at once take at their last token: keys and values of all layers, one layer's
    twice while it grows by a token, and the last token's scores."""
    if METHODS[config.method.kind].rows != "prompts":
        return 0.0
    answers = config.optim.per_device_train_batch_size * sampled_together(config)
    width = (model.kv_heads or 0) * (model.head_dim or 0)
    cached = 2 * width * length * ((model.layers or 0) + 1) * BYTES[config.model.dtype]
    return answers * (cached + SAMPLED_SCORES * 4.0 * (model.vocab_size or 0))


def tile_tokens(config: RunConfig, facts: Facts) -> int:
    """The most tokens of one tile of the feed-forward blocks, where none are given: about 32k, or a quarter of a batch."""
    tokens = batch_tokens(config, facts)
    return config.memory.tiled_mlp_tokens or (TILE_TOKENS if tokens > TILE_TOKENS else max(16, math.ceil(tokens / 4)))


def state_bytes(config: RunConfig, counts: Parameters) -> float:
    """Bytes of the optimizer's states."""
    name, size = config.optim.optim, trained_size(config)
    if name in STATE_BYTES:
        return counts.trained * STATE_BYTES[name]
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
        return size * (rows * columns + short * math.ceil(own("rank_fraction") * short))
    rank = min(own("rank"), short)
    if name == "q_galore_adamw_8bit":
        return rank * (2.04 * long + short * (own("proj_bits") / 8 + 8 / 256)) + 4 * short
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


def _weights(config: RunConfig, model: ModelFacts, counts: Parameters) -> float:
    kept = BYTES[config.model.dtype]
    linear = sum(wide_in * wide_out * count for _, wide_in, wide_out, count in model.linears)
    return _linear_bytes(config, model) + max(0, counts.base - linear) * kept


def _linear_bytes(config: RunConfig, model: ModelFacts) -> float:
    """Bytes of the layers' linear weights, with their scales."""
    numbers = sum(wide_in * wide_out * count for _, wide_in, wide_out, count in model.linears)
    size = numbers * _linear_size(config, model)
    if config.model.quantization == "fp8":
        for name, wide_in, wide_out, count in model.linears:
            if fp8.why_not(name, wide_out, wide_in) is None:
                size -= count * wide_out * (wide_in * (BYTES[config.model.dtype] - 1) - FP8_SCALE)
    return size


def _linear_size(config: RunConfig, model: ModelFacts) -> float:
    """Bytes of one number of the layers' linear weights, where all are held alike."""
    if model.stored == "fp8" and config.adapter.kind == "lora":
        return 1.0
    return QUANTIZED.get(config.model.quantization, BYTES[config.model.dtype])


def layers_bytes(config: RunConfig, facts: Facts) -> float | None:
    """Bytes of the frozen weights of all decoder layers; nothing while the model's shape is unknown."""
    model, counts = known_model(config, facts), parameters(config, facts)
    if model is None or counts is None or not model.vocab_size or not model.hidden_size:
        return None
    if model.experts:  # fused experts are no linear layers
        numbers = max(0, counts.base - 2 * model.vocab_size * model.hidden_size)
    else:
        numbers = sum(wide_in * wide_out * count for _, wide_in, wide_out, count in model.linears)
        if config.model.quantization == "fp8":
            return _linear_bytes(config, model) or None
    return max(0, numbers - counts.trained_base) * _linear_size(config, model) or None


def _weights_on_the_host(config: RunConfig, facts: Facts) -> float:
    """What `layer_offloading` takes off the card: all layers but two."""
    model, moved = known_model(config, facts), layers_bytes(config, facts)
    if not config.memory.layer_offloading or moved is None or model is None or not model.layers:
        return 0.0
    return moved * max(0, model.layers - 2) / model.layers


def _activations(
    config: RunConfig, facts: Facts, model: ModelFacts, tokens: int, length: int, checkpointing: bool | str
) -> tuple[float, float]:
    """What all layers keep for the backward pass, and what one of them needs while it is differentiated: its gradients,
    and all that it forgot where it is computed again."""
    hidden, layers = model.hidden_size or 0, model.layers or 0
    wide, width = model.intermediate_size or 4 * hidden, model.head_dim or 0
    attention = width * ((model.heads or 0) + 2 * (model.kv_heads or 0))
    size = BYTES[config.model.dtype]
    closed = config.kernels.fused_lora is True and config.adapter.kind == "lora"
    kept_wide = (KEPT_WIDE - (CLOSED_FORM_WIDE if closed else 0.0)) * wide
    kept = KEPT_HIDDEN * hidden + kept_wide + KEPT_ATTENTION * attention
    layer = tokens * kept * size * (KEPT_FROZEN if config.adapter.kind == "lora" else 1.0)
    if config.model.dtype == "float32":
        layer *= KEPT_FLOAT32
    if config.model.attention == "eager":
        layer += tokens * length * (model.heads or 1) * (size + 4)
    gradients = tokens * (GRADIENTS_HIDDEN * hidden + GRADIENTS_WIDE * wide) * size
    if config.memory.tiled_mlp:
        # Of the wide results no layer keeps any, and the one being differentiated has those of one tile.
        whole, share = layer, min(1.0, tile_tokens(config, facts) / tokens)
        layer *= (kept - kept_wide) / kept
        gradients = (whole - layer) * share + tokens * (
            GRADIENTS_HIDDEN * hidden + GRADIENTS_WIDE * wide * share
        ) * size
    layer += _rounded(config, model, tokens) / max(1, layers)
    if config.memory.activation_offloading:
        return OFFLOAD_IN_FLIGHT * tokens * max(hidden, wide) * size, layer + gradients
    if not checkpointing:
        on_gpu = facts.machine is None or bool(facts.machine.gpus)
        compiled = on_gpu and config.kernels.torch_compile is True
        return layer * layers * (KEPT_COMPILED if compiled else 1.0), gradients
    return tokens * _tier_width(model, hidden, wide, checkpointing) * size * layers, layer + gradients


def _rounded(config: RunConfig, model: ModelFacts, tokens: int) -> float:
    """What int8 rounding keeps of weights and inputs in all layers, beside what is kept without it."""
    if config.kernels.quantization_aware is not True:
        return 0.0
    weight = BYTES[config.model.dtype] + (ROUNDED_TRAINED if config.adapter.kind == "none" else 0)
    return sum(
        count * (wide_in * wide_out * weight + tokens * wide_in * ROUNDED_INPUT)
        for _, wide_in, wide_out, count in model.linears
    )


def _tier_width(model: ModelFacts, hidden: int, wide: int, tier: bool | str) -> int:
    """Elements a token that a layer keeps: its input, attention's output, and the products of its tier
    (`engine.memory.tiers`)."""
    if tier not in ("selective", "medium"):
        return hidden
    kept = sum(width for inner, width in _products(model, hidden, wide) if tier == "selective" or width <= inner)
    return hidden + (model.head_dim or 0) * (model.heads or 0) + kept


def _products(model: ModelFacts, hidden: int, wide: int) -> list[tuple[int, int]]:
    """Inner size and width of each matrix product of a dense decoder layer."""
    q, kv = (model.head_dim or 0) * (model.heads or 0), (model.head_dim or 0) * (model.kv_heads or 0)
    return [(hidden, q), (hidden, kv), (hidden, kv), (q, hidden), (hidden, wide), (hidden, wide), (wide, hidden)]


def layer_operations(config: RunConfig, facts: Facts) -> int | None:
    """Floating-point operations of one layer's matrix products in a forward pass of one batch."""
    model = facts.model
    if model is None or not model.hidden_size:
        return None
    wide = model.intermediate_size or 4 * model.hidden_size
    weights = sum(inner * width for inner, width in _products(model, model.hidden_size, wide))
    return 2 * weights * tokens_and_length(config, facts)[0]


def checkpoint_bytes(config: RunConfig, facts: Facts) -> int | None:
    """Bytes of one checkpoint: trained weights, optimizer states, and the little rest."""
    counts = parameters(config, facts)
    if counts is None:
        return None
    trained = counts.trained * trained_size(config)
    return int(trained + state_bytes(config, counts)) + 2 * MiB


def device_bytes(config: RunConfig, facts: Facts) -> int | None:
    """Memory of the smallest card, or what each process has of the host's where training runs on the CPU."""
    if facts.machine is None:
        return None
    if facts.machine.gpus:
        return min(gpu.memory_bytes for gpu in facts.machine.gpus)
    room = facts.machine.memory_bytes
    return None if room is None else room // device_count(config, facts)
