"""Rotary position embedding of q and k in plain torch: the truth for the kernel."""

from __future__ import annotations

import torch


def rope_reference(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`q * cos + rotate_half(q) * sin` and the same for k; rotates the first `cos.shape[-1]` of each head.

    q [B, T, Hq, D], k [B, T, Hk, D], cos and sin [B or 1, T, R] with R <= D even. Computes in float32 (float64 for float64
    input), returns the input's dtype. Source: arXiv:2104.09864.
    """
    return rotated(q, cos, sin), rotated(k, cos, sin)


def rotated(x_BTHD: torch.Tensor, cos_BTR: torch.Tensor, sin_BTR: torch.Tensor) -> torch.Tensor:
    """One of them."""
    wide = torch.float64 if x_BTHD.dtype == torch.float64 else torch.float32
    cos, sin = cos_BTR.to(wide).unsqueeze(2), sin_BTR.to(wide).unsqueeze(2)
    size = cos.shape[-1]
    turn, keep = x_BTHD[..., :size].to(wide), x_BTHD[..., size:]
    first, second = turn.chunk(2, dim=-1)
    turned = turn * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned.to(x_BTHD.dtype), keep), dim=-1)
