"""RMSNorm of q and k heads with rotary embedding: one launch forward, one backward.

Takes q and k as the projections give them ([B, T, H, D], heads next to each other); returns contiguous tensors of that
shape, so the [B, H, T, D] that attention wants is a view. Refuses a rotated part that is odd or longer than a head; float64
and angles that are trained go to the reference.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.kernels.device import kernel_serves
from engine.kernels.heads import angle_strides, blocks, refuse_heads
from engine.kernels.norm_rope.reference import norm_rope_reference
from engine.kernels.shapes import first_derivatives_alone, refuse_formats
from engine.kernels.tuner import TUNER, Cost, Key, Tile, Tiles, bucket

__all__ = ["norm_rope", "norm_rope_reference"]

# Rows of partial sums for the weights' gradient: enough that additions rarely meet, few enough to sum for free. Where torch
# must be deterministic there is a row for each program, and no two additions meet.
_PARTIAL_SUMS = 512


# Registers of a thread as compiled for an H100 and heads of 128, by the elements it holds: 4.5 each forward, 7 backward.
def _forward_cost(tile: Tile) -> Cost:
    heads, warps = tile
    return Cost(16 + 9 * (heads * 4 // warps) // 2, 32 * warps, 1024)


def _backward_cost(tile: Tile) -> Cost:
    heads, warps = tile
    return Cost(16 + 7 * (heads * 4 // warps), 32 * warps, 1024)


# Heads of a program and its warps: the first is the fastest of ten on an H200 (32 + 8 heads of 128).
FORWARD = Tiles("norm_rope_fwd", 1, ("heads", "warps"), ((32, 4), (16, 4), (8, 4), (8, 2), (32, 8)), _forward_cost)
BACKWARD = Tiles("norm_rope_bwd", 1, ("heads", "warps"), ((16, 4), (8, 4), (8, 2), (32, 8), (16, 8)), _backward_cost)


def norm_rope(
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
    """`rope(rms_norm(x) * weight, cos, sin)` for q and k; see `norm_rope_reference` for the plain form.

    Args:
        q, k: [B, T, Hq, D] and [B, T, Hk, D], float32, float16 or bfloat16.
        q_weight, k_weight: [D], or both None for a norm without scale.
        cos, sin: [B or 1, T, R], R even and at most D; the first R of each head are rotated.
        unit_offset: the scale is `1 + weight` (Gemma, Qwen3.5).

    Raises:
        ValueError: shapes, formats or devices that do not belong together. RuntimeError: a second derivative.
    """
    refuse_heads("norm_rope", q, k, cos, sin)
    if (q_weight is None) != (k_weight is None):
        raise ValueError("q_weight and k_weight: must both be given or both be None.")
    if q_weight is not None and k_weight is not None and not q_weight.shape == k_weight.shape == q.shape[-1:]:
        given = f"{tuple(q_weight.shape)} and {tuple(k_weight.shape)}"
        raise ValueError(f"q_weight and k_weight: must be [{q.shape[-1]}]; got {given}")
    refuse_formats("norm_rope", q=q, q_weight=q_weight, k_weight=k_weight)
    compiling = torch.compiler.is_compiling()
    served = q.is_cuda if compiling else kernel_serves(q, k, cos)
    trained = cos.requires_grad or sin.requires_grad
    if not served or trained or torch.float64 in (q.dtype, k.dtype) or q.numel() == 0:
        return norm_rope_reference(q, k, q_weight, k_weight, cos, sin, eps=eps, unit_offset=unit_offset)
    if compiling:
        return _norm_rope_op(q, k, q_weight, k_weight, cos, sin, eps, unit_offset)
    return _NormRope.apply(q, k, q_weight, k_weight, cos, sin, eps, unit_offset)


def _token_stride(x_BTHD: torch.Tensor) -> int | None:
    """Elements from one token to the next when batch and time collapse and heads lie side by side; else None."""
    batch, time, heads, size = x_BTHD.shape
    stride_b, stride_t, stride_h, stride_d = x_BTHD.stride()
    together = (stride_d == 1 or size == 1) and (stride_h == size or heads == 1)
    return stride_t if together and (batch == 1 or stride_b == time * stride_t) else None


def _laid_out(x_BTHD: torch.Tensor) -> tuple[torch.Tensor, int]:
    stride = _token_stride(x_BTHD)
    if stride is None:
        x_BTHD = x_BTHD.contiguous()
        stride = x_BTHD.shape[2] * x_BTHD.shape[3]
    return x_BTHD, stride


def _heads_whole(x_BTHD: torch.Tensor) -> torch.Tensor:
    """Gradients as attention gives them, token by token or head by head, copied only where a head's numbers lie apart."""
    return x_BTHD if x_BTHD.stride(3) == 1 or x_BTHD.shape[3] == 1 else x_BTHD.contiguous()


def _forward(q, k, q_weight, k_weight, cos, sin, eps, unit_offset):
    """One launch; returns outputs and what the backward pass needs to know of the layouts."""
    from engine.kernels.norm_rope.kernels import norm_rope_fwd_kernel

    (q, q_stride), (k, k_stride) = _laid_out(q), _laid_out(k)
    cos, sin = cos.contiguous(), sin.contiguous()
    q_weight, k_weight = (w if w is None else w.contiguous() for w in (q_weight, k_weight))
    batch, time, heads_q, size = q.shape
    heads_k, rotated = k.shape[2], cos.shape[-1]
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    has_weight = q_weight is not None
    shape = heads_q, heads_k, size, rotated

    def launch(tile: Tile) -> None:
        grid, per_program = blocks(batch * time, *shape, tile)
        norm_rope_fwd_kernel[grid](
            q, k, q_out, k_out, q_weight if has_weight else q, k_weight if has_weight else k, cos, sin,
            q_stride, k_stride, time, *angle_strides(cos), heads_q, heads_k, size, rotated // 2, eps,
            HAS_WEIGHT=has_weight, UNIT_OFFSET=unit_offset, **per_program,
        )  # fmt: skip

    launch(_tile(FORWARD, (bucket(batch * time), *shape, str(q.dtype), int(has_weight)), q.device, launch))
    return q_out, k_out


def _tile(tiles: Tiles, key: Key, device: torch.device, launch: Callable[[Tile], object]) -> Tile:
    return TUNER.pick(tiles, key, device, launch) if TUNER.on else tiles.default


def _sums(grid: tuple[int, int]) -> int:
    """Rows of partial sums for so many programs."""
    return grid[0] * grid[1] if torch.are_deterministic_algorithms_enabled() else _PARTIAL_SUMS


def _backward(dq_out, dk_out, q, k, q_weight, k_weight, cos, sin, eps, unit_offset, *, with_dweight):
    """One launch; gradients of q, k and, where asked for, of the weights (else None)."""
    from engine.kernels.norm_rope.kernels import norm_rope_bwd_kernel

    (q, q_stride), (k, k_stride) = _laid_out(q), _laid_out(k)
    dq_out, dk_out = _heads_whole(dq_out), _heads_whole(dk_out)
    cos, sin = cos.contiguous(), sin.contiguous()
    q_weight, k_weight = (w if w is None else w.contiguous() for w in (q_weight, k_weight))
    batch, time, heads_q, size = q.shape
    heads_k, rotated = k.shape[2], cos.shape[-1]
    dq, dk = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    has_weight = q_weight is not None
    with_dweight = has_weight and with_dweight
    shape = heads_q, heads_k, size, rotated

    def launch(tile: Tile) -> list[torch.Tensor]:
        grid, per_program = blocks(batch * time, *shape, tile)
        sums = _sums(grid)
        partial = [
            torch.zeros(sums, size, dtype=torch.float32, device=q.device) if with_dweight else q for _ in range(2)
        ]
        norm_rope_bwd_kernel[grid](
            q, k, dq_out, dk_out, dq, dk, q_weight if has_weight else q, k_weight if has_weight else k, *partial,
            cos, sin, q_stride, k_stride, *dq_out.stride()[:3], *dk_out.stride()[:3], time, *angle_strides(cos),
            heads_q, heads_k, size, rotated // 2, eps, sums,
            HAS_WEIGHT=has_weight, UNIT_OFFSET=unit_offset, WITH_DWEIGHT=with_dweight, **per_program,
        )  # fmt: skip
        return partial

    key = bucket(batch * time), *shape, str(q.dtype), int(has_weight), int(with_dweight)
    partial = launch(_tile(BACKWARD, key, q.device, launch))
    dq_weight, dk_weight = (
        part.sum(0).to(weight.dtype) if with_dweight else None
        for part, weight in zip(partial, (q_weight, k_weight), strict=True)
    )
    return dq, dk, dq_weight, dk_weight


class _NormRope(torch.autograd.Function):
    """The eager path: one autograd node, no dispatch in between."""

    @staticmethod
    def forward(ctx, q, k, q_weight, k_weight, cos, sin, eps, unit_offset):
        ctx.save_for_backward(q, k, q_weight, k_weight, cos, sin)
        ctx.settings = eps, unit_offset
        return _forward(q, k, q_weight, k_weight, cos, sin, eps, unit_offset)

    @staticmethod
    def backward(ctx, dq_out, dk_out):
        first_derivatives_alone("norm_rope")
        with_dweight = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
        gradients = _backward(dq_out, dk_out, *ctx.saved_tensors, *ctx.settings, with_dweight=with_dweight)
        return *gradients, None, None, None, None


# The compiled path: registered operations, which `torch.compile(fullgraph=True)` keeps whole in one graph.
@torch.library.custom_op("workbench::norm_rope", mutates_args=())
def _norm_rope_op(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor | None, k_weight: torch.Tensor | None,
    cos: torch.Tensor, sin: torch.Tensor, eps: float, unit_offset: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return _forward(q, k, q_weight, k_weight, cos, sin, eps, unit_offset)


@torch.library.custom_op("workbench::norm_rope_backward", mutates_args=())
def _norm_rope_backward_op(
    dq_out: torch.Tensor, dk_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor,
    q_weight: torch.Tensor | None, k_weight: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor,
    eps: float, unit_offset: bool, with_dweight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    *found, dq_weight, dk_weight = _backward(
        dq_out, dk_out, q, k, q_weight, k_weight, cos, sin, eps, unit_offset, with_dweight=with_dweight
    )
    # An operation may not hand out one tensor twice.
    return *found, *(q.new_empty(0) if weight is None else weight for weight in (dq_weight, dk_weight))


@_norm_rope_op.register_fake
def _(q, k, q_weight, k_weight, cos, sin, eps, unit_offset):
    return q.new_empty(q.shape), k.new_empty(k.shape)


@_norm_rope_backward_op.register_fake
def _(dq_out, dk_out, q, k, q_weight, k_weight, cos, sin, eps, unit_offset, with_dweight):
    weights = [w.new_empty(w.shape) if with_dweight and w is not None else q.new_empty(0) for w in (q_weight, k_weight)]
    return q.new_empty(q.shape), k.new_empty(k.shape), *weights


def _remember(ctx, inputs, output):
    *tensors, eps, unit_offset = inputs
    ctx.save_for_backward(*tensors)
    ctx.settings = eps, unit_offset


def _differentiate(ctx, dq_out, dk_out):
    with_dweight = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
    *found, dq_weight, dk_weight = _norm_rope_backward_op(
        dq_out, dk_out, *ctx.saved_tensors, *ctx.settings, with_dweight
    )
    weights = (dq_weight, dk_weight) if with_dweight else (None, None)
    return *found, *weights, None, None, None, None


_norm_rope_op.register_autograd(_differentiate, setup_context=_remember)
