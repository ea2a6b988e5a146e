"""`memory.tiled_mlp`: the feed-forward block of each decoder layer runs over tiles of the batch's tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from operator import not_

from engine.config.facts import Facts
from engine.config.findings import Finding, Fix, must
from engine.config.rule import Refused, refused, rule, take
from engine.config.tree import RunConfig, fields
from engine.facts import counts
from engine.features.feature import Layers
from engine.features.packed_experts import packs

SETTING = fields.memory.tiled_mlp
AFTER = ("packed_experts", "fp32_norms")

TILE_TOKENS = 32_768
WHOLE_BATCH_MLPS = ("gpt_oss", "llama4", "llama4_text")
"""Model types whose feed-forward block returns the router's scores beside the hidden states."""
OF_EXPERTS_ALONE = ("gpt_oss",)
"""Those of them that tiles serve where their experts are packed: experts take tiles, the router takes all tokens."""
_TOKENS, _SUMS = fields.memory.tiled_mlp_tokens, fields.memory.tiled_mlp_fp32_sums


refused(
    __name__,
    *(
        Refused(
            "tiles-need-tiled-mlp",
            spec,
            bool,
            "left out while memory.tiled_mlp is false",
            "It acts on tiles alone.",
            take(SETTING, True, "compute in tiles"),
            beside={SETTING: not_},
        )
        for spec in (_TOKENS, _SUMS)
    ),
)


def tile_tokens(config: RunConfig, facts: Facts) -> int:
    """The most tokens of one tile, where none are given: about 32k, or a quarter of a batch."""
    tokens = counts.batch_tokens(config, facts)
    usual = TILE_TOKENS if tokens > TILE_TOKENS else max(16, math.ceil(tokens / 4))
    return config.memory.tiled_mlp_tokens or usual


def memory(config: RunConfig, facts: Facts, layers: Layers) -> Layers:
    """No layer keeps wide results, and the one being differentiated has those of one tile."""
    if not config.memory.tiled_mlp:
        return layers
    return replace(layers, at_once=min(1.0, tile_tokens(config, facts) / layers.tokens))


@rule(reads=(SETTING, _TOKENS, fields.data.max_length, fields.optim.per_device_train_batch_size))
def a_tile_is_smaller_than_a_batch(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    size, tokens = config.memory.tiled_mlp_tokens, counts.batch_tokens(config, facts)
    if config.memory.tiled_mlp and size is not None and size >= tokens:
        todo = "One tile would hold the whole batch, so nothing would be saved."
        fix = Fix("let it be chosen", unset=(_TOKENS.path,))
        yield must(_TOKENS.path, f"less than the {tokens:,} tokens of the largest batch", size, todo, fix=fix)


@rule(
    reads=(
        SETTING, fields.model.name, fields.model.quantization, fields.model.quantize_moe_experts, fields.adapter.kind,
    )
)  # fmt: skip
def tiles_need_a_block_of_tokens_by_themselves(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    model = counts.known_model(config, facts)
    if model is not None and model.model_type in OF_EXPERTS_ALONE and model.experts and packs(config, model):
        return
    if config.memory.tiled_mlp and model is not None and model.model_type in WHOLE_BATCH_MLPS:
        todo = "Its feed-forward block returns the router's scores of all tokens, which tiles would forget."
        fix = Fix("leave it out", unset=(SETTING.path,))
        yield must(SETTING.path, f"false for the model type {model.model_type}", True, todo, fix=fix)
