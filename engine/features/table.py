"""The features of a run: which there are, in which order they act, and what each of them really did.

A feature is a folder beside this file. Its `__init__.py` says without torch which setting asks for it (`SETTING`), after
which others it acts (`AFTER`), and whatever else can be known before a model is built, such as what `auto` takes
(`chosen(config, facts)`, the value and why) and what it changes in the layers' bytes (`memory(config, facts, layers)`); its
`apply.py`, which the worker alone loads, acts on the built model: `prepare(config, built)` before there is a trainer,
`apply(config, built)` after it. Both return `Applied` for the receipt, something with an `undo`, an undo alone, or None
where the feature was not asked for.

Features act on instances alone: library modules and globals stay as they are, so two runs in one process do not meet. A
feature that was asked for and touched nothing raises before the first step; one that has nothing to act on in this method
says so in words.
"""

from __future__ import annotations

from typing import Protocol

from engine.config.tree import FieldSpec
from engine.features import (
    activation_offloading,
    attention_backend,
    auto_compose,
    bf16_full_eval,
    compile,
    cut_cross_entropy,
    expert_parallel,
    fp8_base,
    fp32_norms,
    fused_experts,
    fused_lora,
    fused_norm_rope,
    gradient_checkpointing,
    layer_offloading,
    liger_kernel,
    module_cache,
    packed_experts,
    padding,
    quantization_aware,
    router_load,
    tile_timing,
    tiled_mlp,
    vision_attention,
)


class Feature(Protocol):
    """What a feature's folder says of itself."""

    __name__: str

    @property
    def SETTING(self) -> FieldSpec | None:
        """The setting that asks for it; None for one that serves every run."""

    @property
    def AFTER(self) -> tuple[str, ...]:
        """The features that act before it."""


_LISTED: tuple[Feature, ...] = (
    module_cache,
    packed_experts,
    padding,
    fp32_norms,
    gradient_checkpointing,
    tiled_mlp,
    attention_backend,
    vision_attention,
    quantization_aware,
    auto_compose,
    cut_cross_entropy,
    fused_norm_rope,
    liger_kernel,
    fused_experts,
    router_load,
    expert_parallel,
    fused_lora,
    tile_timing,
    activation_offloading,
    bf16_full_eval,
    compile,
    fp8_base,
    layer_offloading,
)


def name_of(feature: Feature) -> str:
    """Its folder's name."""
    return feature.__name__.rpartition(".")[2]


def in_order(features: tuple[Feature, ...]) -> tuple[Feature, ...]:
    """The features by what each must come after; otherwise as they are listed. Raises ValueError for a circle."""
    left, known, order = list(features), {name_of(feature) for feature in features}, list[Feature]()
    while left:
        done = {name_of(feature) for feature in order}
        ready = next((feature for feature in left if not set(feature.AFTER) & known - done), None)
        if ready is None:
            raise ValueError(f"features that wait for each other: {', '.join(map(name_of, left))}")
        left.remove(ready)
        order.append(ready)
    return tuple(order)


FEATURES = in_order(_LISTED)
"""Every feature, in the order in which they act."""
