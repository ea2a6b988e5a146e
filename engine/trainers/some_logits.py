"""A few logits of each row: `(hidden @ weight.T + bias).gather(1, ids)` without the others.

Rows are worked on in chunks, so that the gathered rows of the head, [rows, K, H], stay within `ROOM` bytes forward and
backward. Sums are in float32 (float64 for float64 input).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

ROOM = 64 << 20


def some_logits(
    hidden_NH: torch.Tensor, weight_VH: torch.Tensor, ids_NK: torch.Tensor, bias_V: torch.Tensor | None = None
) -> torch.Tensor:
    """[N, K] logits of `ids_NK`, float32 or float64; differentiable in hidden, weight and bias."""
    logits: torch.Tensor = _SomeLogits.apply(hidden_NH, weight_VH, ids_NK)
    return logits if bias_V is None else logits + bias_V.to(logits.dtype)[ids_NK]


class _SomeLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_NH: torch.Tensor, weight_VH: torch.Tensor, ids_NK: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden_NH, weight_VH, ids_NK)
        ctx.dtype = torch.float64 if weight_VH.dtype == torch.float64 else torch.float32
        logits = torch.empty(ids_NK.shape, dtype=ctx.dtype, device=hidden_NH.device)
        for part in _chunks(ids_NK, weight_VH):
            rows = weight_VH[ids_NK[part]].to(ctx.dtype)
            logits[part] = torch.einsum("nkh,nh->nk", rows, hidden_NH[part].to(ctx.dtype))
        return logits

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (d_NK,) = gradients
        hidden_NH, weight_VH, ids_NK = ctx.saved_tensors
        need_hidden, need_weight, _ = ctx.needs_input_grad
        d_hidden = torch.empty(hidden_NH.shape, dtype=ctx.dtype, device=d_NK.device) if need_hidden else None
        d_weight = torch.zeros(weight_VH.shape, dtype=ctx.dtype, device=d_NK.device) if need_weight else None
        for part in _chunks(ids_NK, weight_VH):
            if d_hidden is not None:
                d_hidden[part] = torch.einsum("nk,nkh->nh", d_NK[part], weight_VH[ids_NK[part]].to(ctx.dtype))
            if d_weight is not None:
                outer = d_NK[part][..., None] * hidden_NH[part].to(ctx.dtype)[:, None]
                d_weight.index_add_(0, ids_NK[part].flatten(), outer.flatten(0, 1))
        return (
            None if d_hidden is None else d_hidden.to(hidden_NH.dtype),
            None if d_weight is None else d_weight.to(weight_VH.dtype),
            None,
        )


def _chunks(ids_NK: torch.Tensor, weight_VH: torch.Tensor) -> Iterator[slice]:
    size = max(1, ROOM // max(1, ids_NK.shape[1] * weight_VH.shape[1] * 8))
    yield from (slice(first, first + size) for first in range(0, ids_NK.shape[0], size))
