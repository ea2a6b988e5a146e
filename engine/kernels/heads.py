"""Heads of q and k beside the angles that turn them: what ops over them refuse, and how launchers cut them into programs."""

from __future__ import annotations

import torch

from engine.kernels.shapes import refuse_formats
from engine.kernels.tuner import Tile


def refuse_heads(op: str, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Raises ValueError unless q is [B, T, Hq, D], k [B, T, Hk, D], and cos and sin [B or 1, T, R], R even and at most D."""
    if q.dim() != 4 or k.dim() != 4 or cos.dim() != 3:
        given = ", ".join(str(tuple(x.shape)) for x in (q, k, cos))
        raise ValueError(f"{op}: must get q [B, T, Hq, D], k [B, T, Hk, D] and cos [B or 1, T, R]; got {given}")
    rotated = cos.shape[-1]
    if q.shape[:2] != k.shape[:2] or q.shape[-1] != k.shape[-1]:
        raise ValueError(f"k: must share batch, time and head size with q {tuple(q.shape)}; got {tuple(k.shape)}")
    if rotated % 2 or rotated > q.shape[-1] or cos.shape != sin.shape or cos.shape[1] != q.shape[1]:
        raise ValueError(
            f"cos and sin: must be [B or 1, {q.shape[1]}, R] with R even and at most {q.shape[-1]}; "
            f"got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    if cos.shape[0] not in (1, q.shape[0]):
        raise ValueError(f"cos and sin: must have a batch of 1 or {q.shape[0]}; got {cos.shape[0]}")
    refuse_formats(op, q=q, k=k, cos=cos, sin=sin)


def blocks(
    tokens: int, heads_q: int, heads_k: int, size: int, rotated: int, shape: Tile
) -> tuple[tuple[int, int], dict[str, int | bool]]:
    """The grid, and what a program of this shape (heads of 128, warps) is compiled for; of larger heads it takes fewer."""

    def block(n: int, most: int = 1 << 30) -> int:
        return min(1 << max(n - 1, 0).bit_length(), most)

    heads, warps = shape
    most = max(1, heads * 128 // max(block(size), 128))
    of_q, of_k = block(heads_q, most), block(heads_k, most)
    return (tokens, -(-heads_q // of_q) - (-heads_k // of_k)), {
        "HAS_TAIL": rotated < size,
        "BLOCK_HQ": of_q,
        "BLOCK_HK": of_k,
        "BLOCK_F": block(rotated // 2),
        "BLOCK_TAIL": block(size - rotated),
        "num_warps": warps,
    }


def angle_strides(cos_BTR: torch.Tensor) -> tuple[int, int]:
    """Elements from one row of contiguous angles to the next, 0 where one row serves all, and from token to token."""
    return (0 if cos_BTR.shape[0] == 1 else cos_BTR.shape[1] * cos_BTR.shape[2], cos_BTR.shape[2])
