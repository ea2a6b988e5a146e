"""Of compiled layers: adapters are switched off by a factor of 0, so that policy and reference run the same code.

PEFT's `disable_adapter` has a layer skip its adapters, which the compiler makes another graph of: other sums wait in
registers, other ones are rounded to bfloat16, and log-probabilities of policy and reference differ before anything was
learnt. Here each adapter's first matrix is multiplied by a number on the device that is 1, and 0 inside `disable_adapter`.
A product of 0 adds exactly nothing, so the reference is the base model to the bit of these sums. Nor does PEFT walk over
all modules twice a step any more. Refuses adapters whose other parts a factor does not reach (DoRA, dropout, trained copies
of modules inside a layer, adapters on experts) and those that began as more than nothing: there PEFT and TRL do as they always
do. Adapters
outside the compiled layers are PEFT's in any case.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper

from engine.compat.instances import all_of, put

Switchable = BaseTunerLayer, AuxiliaryTrainingWrapper
COPY = "ref"
"""TRL's name for its copy of the adapter of a model that it was given."""


class Gate:
    """The factor, a tensor of shape () in float32: two tensors that take turns, since the backward pass keeps the first."""

    def __init__(self, device: torch.device) -> None:
        self._open, self._shut = torch.ones((), device=device), torch.zeros((), device=device)
        self.value = self._open

    @contextlib.contextmanager
    def shut(self) -> Iterator[None]:
        """Inside, adapters add nothing."""
        before, self.value = self.value, self._shut
        try:
            yield
        finally:
            self.value = before


def gated(model: torch.nn.Module, layers: list[torch.nn.Module]) -> tuple[Gate | None, str, Callable[[], None]]:
    """Gives a PEFT model's `disable_adapter` the gate of its adapters in `layers`: it, why there is none, and the undo.

    The reason is empty for a model without adapters. A copy that TRL keeps of the adapter is one that adds something, or it
    were deleted (`trainers.reference`): there no switch leads to the reference.
    """
    if not isinstance(model, PeftModel):
        return None, "", lambda: None
    inside = {id(module): module for layer in layers for module in layer.modules() if isinstance(module, Switchable)}
    reason = next(filter(None, map(_why_not, inside.values())), None)
    if reason is None and COPY in model.peft_config:
        reason = "an adapter that had learnt something before"
    firsts = [first for module in inside.values() if isinstance(module, LoraLayer) for first in module.lora_A.values()]
    if reason is not None or not firsts:
        return None, reason or "no LoRA in the layers", lambda: None
    gate = Gate(firsts[0].weight.device)
    others = [each for each in model.modules() if isinstance(each, Switchable) and id(each) not in inside]
    off = _without_adapter(model, gate, others)
    undos = [put(first, "forward", types.MethodType(_first_product(gate), first)) for first in firsts]
    undos.append(put(model, "disable_adapter", off))
    return gate, "", all_of(undos)


def _why_not(module: Any) -> str | None:
    """Why a factor does not switch this one off, in a few words, or None."""
    if isinstance(module, ParamWrapper):
        return "an adapter on experts, whose matrices are multiplied with each other"
    if not isinstance(module, LoraLayer) or not module.lora_A:
        return f"{type(module).__name__} in the layers"
    if module.lora_variant:
        return f"{type(next(iter(module.lora_variant.values()))).__name__} in the layers"
    if any(getattr(drop, "p", 0) for drop in module.lora_dropout.values()):
        return "dropout in the adapter"
    if any(module.lora_bias.values()):
        return "an adapter's own bias"
    if any(type(first) is not torch.nn.Linear or first.bias is not None for first in module.lora_A.values()):
        return f"{type(next(iter(module.lora_A.values()))).__name__} as the adapter's first matrix"
    return None


def _first_product(gate: Gate) -> Callable[..., torch.Tensor]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight * gate.value)

    return forward


def _without_adapter(model: PeftModel, gate: Gate, others: list[Any]) -> Callable[[], Any]:
    @contextlib.contextmanager
    def disable_adapter() -> Iterator[None]:
        was, model._adapters_disabled = model._adapters_disabled, True
        for each in () if was else others:
            each.enable_adapters(False)
        try:
            with gate.shut():
                yield
        finally:
            for each in () if was else others:
                each.enable_adapters(True)
            model._adapters_disabled = was

    return disable_adapter
