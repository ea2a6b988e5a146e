"""Puts checkpoints aside without a traversal, and lists the modules of the trainer's model once."""

from __future__ import annotations

from collections.abc import Callable

from engine.compat.module_cache import cache_traversals, put_checkpoints_aside
from engine.config.tree import RunConfig
from engine.features.built import Built, base_model


def prepare(config: RunConfig, built: Built) -> Callable[[], None]:
    """Turning checkpointing off and on again sets the layers' own flags; returns the undo."""
    return put_checkpoints_aside(base_model(built.policy))


def apply(config: RunConfig, built: Built) -> Callable[[], None]:
    """The trainer's model is listed and counted once; returns the undo."""
    return cache_traversals(built.training.model, built.training.accelerator)
