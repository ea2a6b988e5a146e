"""Which weights of a model are trained when only some are named: the names of a model's weights from its shape.

Names are those of transformers' decoders (`model.layers.3.self_attn.q_proj.weight`). It serves the estimate alone; a
run counts the model's own parameters (`engine.models.adapters`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from engine.config.facts import ModelFacts

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")
_NAMED = {*_ATTENTION, "gate_proj", "up_proj", "down_proj", "gate_up_proj"}
"""Layers whose place in a block is known by their name."""


def trained_by_name(model: ModelFacts, patterns: list[str]) -> int | None:
    """Parameters whose names begin with a match of one of the regular expressions; None where no name can be known, as those
    of a mixture's experts."""
    if model.experts or not model.linears or not model.layers or not model.hidden_size or not model.vocab_size:
        return None
    if not {name for name, *_ in model.linears} <= _NAMED:
        return None
    try:
        known = [re.compile(pattern) for pattern in patterns]
    except re.error:
        return None
    return sum(size for name, size in _names(model) if any(pattern.match(name) for pattern in known))


def matrices_by_name(model: ModelFacts, patterns: list[str]) -> tuple[tuple[int, int, int], ...]:
    """Those of them that are linear layers, as (rows, columns, how many); `trained_by_name` must know the names."""
    known = [re.compile(pattern) for pattern in patterns]
    layers = model.layers or 1
    matrices = [
        (wide_out, wide_in, count // layers)
        for layer in range(layers)
        for name, wide_in, wide_out, count in model.linears
        if any(pattern.match(_weight(layer, name)) for pattern in known)
    ]
    return tuple(matrices)


def _weight(layer: int, name: str) -> str:
    return f"model.layers.{layer}.{'self_attn' if name in _ATTENTION else 'mlp'}.{name}.weight"


def _names(model: ModelFacts) -> Iterator[tuple[str, int]]:
    hidden, layers = model.hidden_size or 0, model.layers or 0
    head = hidden * (model.vocab_size or 0)
    yield "model.embed_tokens.weight", head
    in_layers = layers * sum(wide_in * wide_out * count // layers for _, wide_in, wide_out, count in model.linears)
    if model.parameters is not None and model.parameters - in_layers > 1.5 * head:
        yield "lm_head.weight", head  # not tied to the embeddings
    yield "model.norm.weight", hidden
    for layer in range(layers):
        for name, wide_in, wide_out, count in model.linears:
            yield _weight(layer, name), wide_in * wide_out * count // layers
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"model.layers.{layer}.{norm}.weight", hidden
