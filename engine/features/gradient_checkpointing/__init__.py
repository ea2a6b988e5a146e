"""`memory.gradient_checkpointing`: what of a layer is kept for the backward pass and what is computed again."""

from __future__ import annotations

from dataclasses import replace

from engine.config.facts import Facts, ModelFacts
from engine.config.tree import RunConfig, fields
from engine.facts.counts import products
from engine.features.feature import Layers

SETTING = fields.memory.gradient_checkpointing
AFTER = ("module_cache",)


def tier_width(model: ModelFacts, tier: bool | str) -> int:
    """Numbers a token that a layer keeps: its input, attention's output, and the products of its tier
    (`engine.features.gradient_checkpointing.tiers`)."""
    hidden = model.hidden_size or 0
    if tier not in ("selective", "medium"):
        return hidden
    kept = sum(width for inner, width in products(model) if tier == "selective" or width <= inner)
    return hidden + (model.head_dim or 0) * (model.heads or 0) + kept


def memory(config: RunConfig, facts: Facts, layers: Layers) -> Layers:
    """A layer keeps what its tier does."""
    return replace(layers, again=tier_width(layers.model, layers.checkpointing)) if layers.checkpointing else layers
