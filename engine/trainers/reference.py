"""The reference model of methods that are held to one: a frozen copy, or the model itself with its adapter off."""

from __future__ import annotations

from typing import Any

from engine.models.load import load_model


def frozen_copy(config: Any) -> Any | None:
    """The base model loaded a second time and frozen, where `method.reference` is `copy`; else None."""
    if config.method.reference != "copy":
        return None
    return load_model(config).eval().requires_grad_(False)


def where(trainer: Any) -> str:
    """Where the built trainer takes its reference from, in words for the receipt."""
    if getattr(trainer, "precompute_ref_logps", False):
        return "reference: precomputed"
    return "reference: copy" if trainer.ref_model is not None else "reference: adapter off"
