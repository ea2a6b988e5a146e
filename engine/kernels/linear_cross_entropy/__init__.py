"""Cross-entropy from hidden states and the head, never holding all logits: the sum of what `linear_logp` says of each row."""

from __future__ import annotations

import torch

from engine.kernels.linear_cross_entropy.reference import linear_cross_entropy_reference
from engine.kernels.linear_logp import linear_logp
from engine.kernels.shapes import refuse_shapes

__all__ = ["linear_cross_entropy", "linear_cross_entropy_reference"]


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    soft_cap: float | None = None,
    logit_scale: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
    normaliser: float | torch.Tensor | None = None,
    workspace_bytes: int | None = None,
) -> torch.Tensor:
    """`cross_entropy(hidden @ weight.T + bias, targets, reduction="sum") / normaliser` without the logits.

    Args:
        hidden: [N, H] float64, float32, float16 or bfloat16; weight: [V, H]; targets: [N] int64. bias: [V] or None.
        soft_cap: logits become `soft_cap * tanh(logits / soft_cap)` (Gemma 2). logit_scale multiplies them first.
        label_smoothing, z_loss: as in torch and in PaLM (arXiv:2204.02311), both inside the mean.
        normaliser: what the summed loss is divided by; the number of kept targets when None.
        workspace_bytes: memory for logits beyond the returned gradients.

    Returns:
        A scalar, float32 (float64 for float64 input); zero, with zero gradients, when every target is ignored; NaN on a
        GPU for a target outside the vocabulary, where a CPU raises.

    Raises:
        ValueError: shapes or formats that do not belong together.

    Source: arXiv:2411.09009 (the loss without logits), arXiv:2410.10989 (gradient in the forward pass).
    """
    refuse_shapes("linear_cross_entropy", hidden, weight, targets, bias)
    each = linear_logp(
        hidden, weight, targets, bias=bias, soft_cap=soft_cap, logit_scale=logit_scale, label_smoothing=label_smoothing,
        z_loss=z_loss, ignore_index=ignore_index, outputs=("cross_entropy",), workspace_bytes=workspace_bytes,
    ).cross_entropy  # fmt: skip
    assert each is not None
    return each.sum() / ((targets != ignore_index).sum().clamp(min=1) if normaliser is None else normaliser)
