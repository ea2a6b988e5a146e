"""The reference model of methods that are held to one: a frozen copy, or the model itself with its adapter off."""

from __future__ import annotations

from typing import Any

from engine.models.load import load_model
from engine.patches.gate import COPY

_FIRST, _SECOND = ("lora_A", "lora_embedding_A"), ("lora_B", "lora_embedding_B")


def frozen_copy(config: Any) -> Any | None:
    """The base model loaded a second time and frozen, where `method.reference` is `copy`; else None."""
    if config.method.reference != "copy":
        return None
    return load_model(config).eval().requires_grad_(False)


def without_needless_copy(trainer: Any) -> None:
    """Deletes the copy of a fresh adapter that TRL takes as reference; without it TRL switches the adapter off.

    Its second matrices are zero and modules saved whole are as they were, so the numbers are the same to the bit, without its
    memory, its products in each step and its share of each checkpoint. Kept where it holds more: an adapter that had learnt,
    DoRA.
    """
    model = trainer.model
    if COPY in getattr(model, "peft_config", {}) and _adds_nothing(model):
        model.delete_adapter(COPY)


def _adds_nothing(model: Any) -> bool:
    """Whether every weight of the copy is one of LoRA's that adds nothing or is its original's."""
    weights = dict(model.named_parameters(remove_duplicate=False))  # a tied original has two names
    for name, weight in weights.items():
        path = name.split(".")
        if COPY not in path:
            continue
        if "modules_to_save" in path:
            original = weights[name.replace(f".modules_to_save.{COPY}.", ".original_module.")]
            if weight.dtype != original.dtype or not weight.equal(original):
                return False
        elif any(part in path for part in _SECOND):
            if weight.any():
                return False
        elif not any(part in path for part in _FIRST):
            return False
    return True


def where(trainer: Any) -> str:
    """Where the built trainer takes its reference from, in words for the receipt."""
    if getattr(trainer, "precompute_ref_logps", False):
        return "reference: precomputed"
    if trainer.ref_model is not None:
        return "reference: copy"
    kept = COPY in getattr(trainer.model, "peft_config", {})
    return "reference: the adapter as it began" if kept else "reference: adapter off"
