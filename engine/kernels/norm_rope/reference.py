"""RMSNorm over each head of q and k, then rotary position embedding, in plain torch: the truth for the kernel."""

from __future__ import annotations

import torch

from engine.kernels.rope.reference import rotated


def norm_rope_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    eps: float = 1e-6,
    unit_offset: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rope(rms_norm(q) * q_weight, cos, sin)` and the same for k; rotates the first `cos.shape[-1]` of each head.

    q [B, T, Hq, D], k [B, T, Hk, D], weights [D] or None (norm without scale), cos and sin [B or 1, T, R] with R <= D
    even. Computes in float32 (float64 for float64 input), returns the input's dtype.
    """
    return _one(q, q_weight, cos, sin, eps, unit_offset), _one(k, k_weight, cos, sin, eps, unit_offset)


def _one(
    x_BTHD: torch.Tensor,
    weight_D: torch.Tensor | None,
    cos_BTR: torch.Tensor,
    sin_BTR: torch.Tensor,
    eps: float,
    unit_offset: bool,
) -> torch.Tensor:
    wide = torch.float64 if x_BTHD.dtype == torch.float64 else torch.float32
    x = x_BTHD.to(wide)
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if weight_D is not None:
        y = y * (weight_D.to(wide) + 1 if unit_offset else weight_D.to(wide))
    return rotated(y, cos_BTR, sin_BTR).to(x_BTHD.dtype)
