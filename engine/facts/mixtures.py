"""Layers of mixtures of experts that are not like Llama's: latent attention (DeepSeek-V2, V3), linear attention (Qwen3-Next,
Qwen3.5), and those whose first layers are dense or whose attention is normed whole (GLM-4.5, MiniMax-M2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Linear = tuple[str, int, int, int]
_LATENT = "deepseek_v2", "deepseek_v3"
_LINEAR = "qwen3_next", "qwen3_5_moe_text"
_STEPPED = {"qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_vl_moe_text", "qwen3_omni_moe_text"}
_DENSE_UNLESS_SAID = {"deepseek_v3": 3, "glm4_moe": 1}
"""How many first layers are dense where a config.json leaves that to transformers."""
KNOWN = {*_LATENT, *_LINEAR, "glm4_moe", "minimax_m2"}


def layers_with_experts(kind: str, shape: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """The numbers of the layers that have experts, as transformers builds them: the first ones of some families are dense, of
    Qwen's those that are named, and all but every nth."""
    told = shape.get("mlp_layer_types")
    if isinstance(told, list):
        return tuple(number for number, one in enumerate(told[:layers]) if one == "sparse")
    if kind in _STEPPED:
        dense, step = shape.get("mlp_only_layers"), _size(shape, "decoder_sparse_step") or 1
        dense = dense if isinstance(dense, list) else []
        return tuple(number for number in range(layers) if number not in dense and (number + 1) % step == 0)
    said = "first_k_dense_replace" in shape
    return tuple(range(_size(shape, "first_k_dense_replace") if said else _DENSE_UNLESS_SAID.get(kind, 0), layers))


def linears(kind: str, shape: Mapping[str, Any], hidden: int, layers: int) -> Iterator[Linear]:
    """Linear layers as `(name, in, out, how many)`, experts left out."""
    full = _full(kind, shape, layers)
    if kind in _LATENT:
        yield from _latent(shape, hidden, layers)
    elif full:
        heads, keys, size = _heads(shape, hidden)
        yield ("q_proj", hidden, heads * size * (2 if kind in _LINEAR else 1), full)  # a gate beside the queries
        yield from (("k_proj", hidden, keys * size, full), ("v_proj", hidden, keys * size, full))
        yield ("o_proj", heads * size, hidden, full)
    if full < layers:
        keys, values = _of_linear_attention(shape)
        many, count = _size(shape, "linear_num_value_heads"), layers - full
        if kind == "qwen3_next":
            yield ("in_proj_qkvz", hidden, 2 * keys + 2 * values, count)
            yield ("in_proj_ba", hidden, 2 * many, count)
        else:
            yield from (("in_proj_qkv", hidden, 2 * keys + values, count), ("in_proj_z", hidden, values, count))
            yield from (("in_proj_b", hidden, many, count), ("in_proj_a", hidden, many, count))
        yield ("out_proj", values, hidden, count)
    mixed = len(layers_with_experts(kind, shape, layers))
    yield from _feed_forward(hidden, _size(shape, "intermediate_size"), layers - mixed)
    wide = _size(shape, "shared_expert_intermediate_size")
    yield from _feed_forward(
        hidden, wide or _size(shape, "n_shared_experts") * _size(shape, "moe_intermediate_size"), mixed
    )
    if wide:
        yield ("shared_expert_gate", hidden, 1, mixed)


def vectors(kind: str, shape: Mapping[str, Any], hidden: int, layers: int) -> int:
    """Numbers of norms, biases and what else is no matrix of a linear layer or an expert, the router's matrix with them."""
    full = _full(kind, shape, layers)
    total = (2 * layers + 1) * hidden + len(layers_with_experts(kind, shape, layers)) * hidden * _experts(shape)
    if kind in _LATENT:
        total += layers * (_size(shape, "q_lora_rank") + _size(shape, "kv_lora_rank"))
        return total + (layers * _biases_of_latent(shape, hidden) if shape.get("attention_bias") else 0)
    heads, keys, size = _heads(shape, hidden)
    if kind == "minimax_m2":
        total += layers * (heads + keys) * size
    elif kind in _LINEAR or shape.get("use_qk_norm"):
        total += full * 2 * size
    if kind == "glm4_moe" and shape.get("attention_bias"):
        total += layers * (heads + 2 * keys) * size
    if full < layers:
        inner, values = _of_linear_attention(shape)
        window = _size(shape, "linear_conv_kernel_dim") or 4
        of_one = (2 * inner + values) * window + 2 * _size(shape, "linear_num_value_heads")
        total += (layers - full) * (of_one + _size(shape, "linear_value_head_dim"))
    return total


def _latent(shape: Mapping[str, Any], hidden: int, layers: int) -> Iterator[Linear]:
    heads, rank = _size(shape, "num_attention_heads"), _size(shape, "q_lora_rank")
    turned, plain = _size(shape, "qk_rope_head_dim"), _size(shape, "qk_nope_head_dim")
    latent, values = _size(shape, "kv_lora_rank"), _size(shape, "v_head_dim")
    queries = heads * (turned + plain)
    if rank:
        yield from (("q_a_proj", hidden, rank, layers), ("q_b_proj", rank, queries, layers))
    else:
        yield ("q_proj", hidden, queries, layers)
    yield ("kv_a_proj_with_mqa", hidden, latent + turned, layers)
    yield ("kv_b_proj", latent, heads * (plain + values), layers)
    yield ("o_proj", heads * values, hidden, layers)


def _biases_of_latent(shape: Mapping[str, Any], hidden: int) -> int:
    return _size(shape, "q_lora_rank") + _size(shape, "kv_lora_rank") + _size(shape, "qk_rope_head_dim") + hidden


def _feed_forward(hidden: int, wide: int, count: int) -> Iterator[Linear]:
    if wide and count:
        yield from (("gate_proj", hidden, wide, count), ("up_proj", hidden, wide, count))
        yield ("down_proj", wide, hidden, count)


def _full(kind: str, shape: Mapping[str, Any], layers: int) -> int:
    """How many layers have attention of all tokens to all."""
    if kind not in _LINEAR:
        return layers
    told = shape.get("layer_types")
    if isinstance(told, list):
        return told.count("full_attention")
    return layers // (_size(shape, "full_attention_interval") or 4)


def _of_linear_attention(shape: Mapping[str, Any]) -> tuple[int, int]:
    keys = _size(shape, "linear_num_key_heads") * _size(shape, "linear_key_head_dim")
    return keys, _size(shape, "linear_num_value_heads") * _size(shape, "linear_value_head_dim")


def _heads(shape: Mapping[str, Any], hidden: int) -> tuple[int, int, int]:
    """Heads of queries and of keys, and numbers of one."""
    heads = _size(shape, "num_attention_heads")
    return heads, _size(shape, "num_key_value_heads") or heads, _size(shape, "head_dim") or hidden // max(heads, 1)


def _experts(shape: Mapping[str, Any]) -> int:
    return next(
        filter(None, (_size(shape, name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))), 0
    )


def _size(shape: Mapping[str, Any], name: str) -> int:
    value = shape.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**40 else 0
