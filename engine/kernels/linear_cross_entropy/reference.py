"""Cross-entropy from hidden states and the head, in plain torch with every logit in memory: the truth for the op."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def linear_cross_entropy_reference(
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
) -> torch.Tensor:
    """`sum(cross_entropy(hidden @ weight.T + bias, targets) + z_loss * logsumexp**2) / normaliser`; see the op."""
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    logits = F.linear(hidden, weight, bias).to(wide) * logit_scale
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    kept = targets != ignore_index
    total = F.cross_entropy(
        logits, targets, reduction="sum", ignore_index=ignore_index, label_smoothing=label_smoothing
    )
    if z_loss:
        total = total + z_loss * (logits.logsumexp(-1).square() * kept).sum()
    return total / (kept.sum().clamp(min=1) if normaliser is None else normaliser)
