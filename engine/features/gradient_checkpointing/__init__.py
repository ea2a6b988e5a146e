"""`memory.gradient_checkpointing`: what of a layer is kept for the backward pass and what is computed again."""

from __future__ import annotations

from dataclasses import replace

from engine.config.facts import Facts, ModelFacts
from engine.config.rule import Refused, leave_out, one_of, refused
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


def left_out(config: RunConfig, model: ModelFacts) -> int:
    """How many layers, the last ones, keep everything though others are computed again."""
    asked = config.memory.recompute_num_layers
    return 0 if asked is None or asked == "auto" else max(0, (model.layers or 0) - asked)


def memory(config: RunConfig, facts: Facts, layers: Layers) -> Layers:
    """A layer keeps what its tier does."""
    if not layers.checkpointing:
        return layers
    again = tier_width(layers.model, layers.checkpointing)
    return replace(layers, again=again, left_out=left_out(config, layers.model))


_LAYERS = fields.memory.recompute_num_layers
refused(
    __name__,
    Refused(
        "layers-computed-again-need-checkpointing",
        _LAYERS,
        bool,
        f"empty while {SETTING.path} is false",
        "No layer is computed again.",
        leave_out(_LAYERS),
        beside={SETTING: one_of(False)},
        severity="warning",
    ),
    # What streams or is moved away is counted for layers that keep their input alone.
    *(
        Refused(
            f"layers-that-keep-everything-stay-{name}",
            _LAYERS,
            bool,
            f"empty with {spec.path}",
            "It moves what layers keep or are made of, for which all of them are computed again.",
            leave_out(_LAYERS),
            beside={spec: bool},
        )
        for name, spec in (
            ("where-they-are", fields.memory.layer_offloading),
            ("on-the-card", fields.memory.activation_offloading),
        )
    ),
)
