"""Weights of four bits that stay as they are while a model is trained on a CPU.

On a processor that multiplies bfloat16 by itself, bitsandbytes 0.50 lays a layer's four bits out anew at its first call
outside training, for good, and what it then multiplies with has no gradient: after one look at held-out rows or one sample
the layers below would learn from the adapters' paths alone. Each layer's own instance is told not to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_SWITCH = "support_avx512bf16_for_cpu"


def keep_differentiable(model: torch.nn.Module) -> None:
    """Leaves the four bits of this model's layers in the one layout whose products have gradients."""
    for module in model.modules():
        if hasattr(module, _SWITCH):
            setattr(module, _SWITCH, False)
