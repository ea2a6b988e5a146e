"""Scores of tokens from hidden states and the head, in plain torch with every logit in memory: the truth for the op."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F


class TokenScores(NamedTuple):
    """What a head says about each target, [N] each: log-probabilities always, the others where they were asked for."""

    log_probs: torch.Tensor
    entropy: torch.Tensor | None
    log_sum_sq_probs: torch.Tensor | None
    mean_logits: torch.Tensor | None
    is_top1: torch.Tensor | None
    cross_entropy: torch.Tensor | None = None


def linear_logp_reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    soft_cap: float | None = None,
    logit_scale: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int | None = None,
) -> TokenScores:
    """All scores of `hidden` [N, H] under the head `weight` [V, H] for `targets` [N]; see the op.

    float32 results, float64 for float64 input. The third to fifth carry no gradient.
    """
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    logits = F.linear(hidden, weight, bias).to(wide) * logit_scale
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    logits = logits / temperature
    logp_NV = F.log_softmax(logits, dim=-1)
    flat = logp_NV.detach()
    kept = torch.ones_like(targets, dtype=torch.bool) if ignore_index is None else targets != ignore_index
    safe = targets.masked_fill(~kept, 0)
    loss = F.cross_entropy(logits, safe, reduction="none", label_smoothing=label_smoothing)
    scores = (
        logp_NV.gather(-1, safe.unsqueeze(-1)).squeeze(-1),
        # A word that cannot come adds nothing, where zero times its infinite logarithm would be NaN.
        -(logp_NV.exp() * logp_NV.masked_fill(flat.isneginf(), 0.0)).sum(-1),
        (2 * flat).logsumexp(-1),
        logits.detach().mean(-1),
        logits.detach().argmax(-1) == safe,
        loss + z_loss * logits.logsumexp(-1).square(),
    )
    return TokenScores(*(score.masked_fill(~kept, 0) for score in scores))
