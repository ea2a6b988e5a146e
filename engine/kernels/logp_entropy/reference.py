"""Log-probability of the targets and entropy of the distribution, in plain torch: the truth for the kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def logp_entropy_reference(
    logits: torch.Tensor, targets: torch.Tensor, *, temperature: float = 1.0, ignore_index: int = -100
) -> tuple[torch.Tensor, torch.Tensor]:
    """`log_softmax(logits / temperature).gather(targets)` and `-(p * log p).sum(-1)`.

    `logits` [..., V] floating, `targets` [...] int64. Both results are [...] in float32 (float64 for float64 logits);
    rows whose target is `ignore_index` give zero in both.
    """
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    logp_V = F.log_softmax(logits.to(wide) / temperature, dim=-1)
    kept = targets != ignore_index
    safe = torch.where(kept, targets, torch.zeros_like(targets))
    logp = logp_V.gather(-1, safe.unsqueeze(-1)).squeeze(-1)
    # A word that cannot come adds nothing, where zero times its infinite logarithm would be NaN.
    entropy = -(logp_V.exp() * logp_V.masked_fill(logp_V.detach().isneginf(), 0.0)).sum(-1)
    zero = torch.zeros((), dtype=wide, device=logits.device)
    return torch.where(kept, logp, zero), torch.where(kept, entropy, zero)
