"""Gives the policy's layers the tier of checkpointing that is set; plain checkpointing is the trainer's own."""

from __future__ import annotations

from collections.abc import Callable

from engine.config.tree import RunConfig
from engine.features.built import Built, base_model
from engine.features.gradient_checkpointing.tiers import POLICIES, use_tier


def prepare(config: RunConfig, built: Built) -> Callable[[], None] | None:
    """Sets `selective` or `medium` on the model; returns the undo."""
    tier = config.memory.gradient_checkpointing
    return use_tier(base_model(built.policy), tier) if tier in POLICIES else None
