"""The reference model of methods that are held to one: a frozen copy, or the model itself with its adapter off."""

from __future__ import annotations

from peft import PeftModel
from transformers import PreTrainedModel

from engine.config.kinds import reference_of
from engine.config.tree import RunConfig
from engine.features.built import ReferenceBy
from engine.features.compile.gate import COPY
from engine.features.load import load_model
from engine.trainers.run_trainer import RunTrainer

TRAINED = "default"
"""PEFT's name for an adapter that is given none: that of each run."""
_FIRST, _SECOND = ("lora_A", "lora_embedding_A"), ("lora_B", "lora_embedding_B")


class ReferenceTrainer(RunTrainer):
    """Mixed in before TRL's trainers that hold the policy to a reference."""

    beta: float
    precompute_ref_logps = False

    def reference_by(self) -> ReferenceBy:
        if self.precompute_ref_logps:
            return "precomputed"
        if self.ref_model is not None:
            return "copy"
        return "adapter_off" if self.beta else "none"

    def reference_note(self) -> str:
        """Where the built trainer takes its reference from, in words for the receipt."""
        by = self.reference_by()
        if by == "adapter_off" and isinstance(self.model, PeftModel) and COPY in self.model.peft_config:
            return "reference: the adapter as it began"
        return f"reference: {by.replace('_', ' ')}"

    def settle_copy(self, config: RunConfig) -> None:
        """Keeps TRL's copy of an adapter that training goes on from, in the format of the adapter itself, where that is what
        the policy is held to; else deletes it, where it is needless or was not asked for."""
        if not isinstance(self.model, PeftModel) or COPY not in self.model.peft_config:
            return
        if config.adapter.kind == "lora" and config.adapter.path and reference_of(config.method) == "adapter_off":
            self.model.delete_adapter(COPY)
            return
        self.without_needless_copy()
        weights = dict(self.model.named_parameters(remove_duplicate=False))
        for name, weight in weights.items():
            if COPY in name.split("."):
                own = weights[".".join(TRAINED if part == COPY else part for part in name.split("."))]
                weight.data = weight.data.to(own.dtype)

    def without_needless_copy(self) -> None:
        """Deletes the copy of a fresh adapter that TRL takes as reference; without it TRL switches the adapter off.

        Its second matrices are zero and modules saved whole are as they were, so the numbers are the same to the bit, without
        its memory, its products in each step and its share of each checkpoint. Kept where it holds more: an adapter that had
        learnt, DoRA.
        """
        if isinstance(self.model, PeftModel) and COPY in self.model.peft_config and _adds_nothing(self.model):
            self.model.delete_adapter(COPY)


def copy_adapter(model: PeftModel) -> None:
    """Adds a frozen copy of the trained adapter beside it, under the name that TRL looks for."""
    model.add_adapter(COPY, model.peft_config[TRAINED])
    weights = dict(model.named_parameters(remove_duplicate=False))
    for name, weight in weights.items():
        if COPY in name.split("."):
            own = weights[".".join(TRAINED if part == COPY else part for part in name.split("."))]
            weight.data = own.detach().clone()


def frozen_copy(config: RunConfig) -> PreTrainedModel | None:
    """The base model loaded a second time and frozen, where `method.reference` is `copy`; else None."""
    if reference_of(config.method) != "copy":
        return None
    model = load_model(config).eval()
    model.requires_grad_(False)
    return model


def _adds_nothing(model: PeftModel) -> bool:
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
