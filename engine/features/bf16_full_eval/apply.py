"""`optim.bf16_full_eval`: held-out rows are computed with bfloat16 weights, and training goes on with its own.

transformers has a switch of this name, which does nothing while a training is under way; here the trainer instance's
`evaluate` swaps the float32 weights for a bfloat16 copy and puts the very same tensors back, whatever happens. Buffers
stay as they are: rotary angles need their digits.
"""

from __future__ import annotations

from typing import Any

import torch

from engine import figures
from engine.compat.instances import put
from engine.config.tree import RunConfig
from engine.features.applied import Applied
from engine.features.built import Built

FEATURE = "bf16 full eval"


def apply(config: RunConfig, built: Built) -> Applied | None:
    """Wraps this trainer's `evaluate`; None where it was not asked for."""
    if not config.optim.bf16_full_eval:
        return None
    weights, trainer = float32_weights(built), built.training
    evaluate = trainer.evaluate

    def in_bfloat16(*args: Any, **kwargs: Any) -> Any:
        # A schedule-free optimizer averages here, in float32: what it averages into must be what comes back.
        trainer.average_weights()
        kept = [weight.data for weight in weights]
        try:
            for weight in weights:
                weight.data = weight.data.to(torch.bfloat16)
            return evaluate(*args, **kwargs)
        finally:
            for weight, data in zip(weights, kept, strict=True):
                weight.data = data

    undo = put(trainer, "evaluate", in_bfloat16)
    copied = sum(weight.numel() for weight in weights) * 2
    detail = f"weights; a copy of {figures.size(copied)} while held-out rows are computed"
    return Applied(FEATURE, True, "bfloat16", len(weights), detail, undo)


def float32_weights(built: Built) -> list[torch.nn.Parameter]:
    """The float32 weights of the trainer's models, each once."""
    found = {
        id(weight): weight for model in built.models() for weight in model.parameters() if weight.dtype == torch.float32
    }
    return list(found.values())
