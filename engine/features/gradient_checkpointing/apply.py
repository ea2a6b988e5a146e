"""Gives the policy's layers the tier of checkpointing that is set; plain checkpointing is the trainer's own."""

from __future__ import annotations

from collections.abc import Callable

from engine.compat.instances import all_of
from engine.config.tree import RunConfig
from engine.features.built import Built, base_model
from engine.features.gradient_checkpointing.tiers import POLICIES, leave_out, use_tier


def prepare(config: RunConfig, built: Built) -> Callable[[], None] | None:
    """Sets `selective` or `medium` on the model, and the layers that it is for; returns the undo."""
    tier, first = config.memory.gradient_checkpointing, config.memory.recompute_num_layers
    model, undos = base_model(built.policy), list[Callable[[], None]]()
    if tier in POLICIES:
        undos.append(use_tier(model, tier))
    if tier and isinstance(first, int):
        undos.append(leave_out(model, first))
    return all_of(undos) if undos else None
