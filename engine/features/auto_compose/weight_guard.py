"""What tells whether a model's weights were written to between two looks, without a copy of them."""

from __future__ import annotations

import torch


def snapshot(model: torch.nn.Module) -> list[tuple[int, int, bool]]:
    """For each weight its place, how often it changed, and whether it has a gradient.

    A weight that PEFT adapts by its name takes another number of changes in each pass, as it is put into a
    parametrization and taken out again; of those the content counts.
    """
    from peft.tuners.lora.layer import ParamWrapper

    from engine.kernels.experts.packed import PackedExperts

    named = {id(module.get_param()) for module in model.modules() if isinstance(module, ParamWrapper)}
    return [
        (held.data_ptr(), _content(held) if id(weight) in named else held._version, weight.grad is None)
        for weight in model.parameters()
        for held in (weight.held.numbers if isinstance(weight, PackedExperts) else weight,)
    ]


def _content(weight: torch.Tensor) -> int:
    """The sum of the weight's bytes as whole numbers."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
    return int(weight.detach().flatten().view(whole).sum(dtype=torch.int64))
