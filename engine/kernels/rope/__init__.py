"""Rotary embedding of q and k heads in one launch, for attention that does not norm them; its gradient is one launch too.

Takes q and k as the projections give them ([B, T, H, D]) or as any view of them whose heads are not strided within;
returns contiguous tensors of that shape, so the [B, H, T, D] that attention wants is a view. The rotation is linear and its
gradient is its transpose: nothing of q and k is kept for the backward pass, and any derivative of it is the same kernel.
Refuses a rotated part that is odd or longer than a head; float64 and angles that are trained go to the reference.
"""

from __future__ import annotations

import torch

from engine.kernels.device import kernel_serves
from engine.kernels.heads import angle_strides, blocks, refuse_heads
from engine.kernels.rope.reference import rope_reference
from engine.kernels.tuner import TUNER, Cost, Tile, Tiles, bucket

__all__ = ["rope", "rope_reference"]


# Registers of a thread as compiled for an H100 and heads of 128, by the elements it holds: 2 each, and 28 beside them.
def _cost(tile: Tile) -> Cost:
    heads, warps = tile
    return Cost(28 + 2 * (heads * 4 // warps), 32 * warps)


TILES = Tiles("rope", 1, ("heads", "warps"), ((16, 2), (16, 4), (8, 2), (32, 4), (8, 4)), _cost)
"""Heads of a program and its warps, for heads of 128: the first is the fastest of nine on an H200 (28 + 4, 12 + 2, 32 + 8)."""


def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`q * cos + rotate_half(q) * sin` and the same for k; see `rope_reference` for the plain form.

    Args:
        q, k: [B, T, Hq, D] and [B, T, Hk, D], float32, float16 or bfloat16.
        cos, sin: [B or 1, T, R], R even and at most D; the first R of each head are rotated. Multimodal positions come
            with their three axes merged into one R, as transformers' rotary embeddings of Qwen2-VL give them.

    Raises:
        ValueError: shapes, formats or devices that do not belong together.
    """
    refuse_heads("rope", q, k, cos, sin)
    compiling = torch.compiler.is_compiling()
    served = q.is_cuda if compiling else kernel_serves(q, k, cos)
    trained = cos.requires_grad or sin.requires_grad
    if not served or trained or torch.float64 in (q.dtype, k.dtype) or not q.numel() or not k.numel():
        return rope_reference(q, k, cos, sin)
    if compiling:
        found: tuple[torch.Tensor, torch.Tensor] = _rope_op(q, k, cos, sin, False)
        return found
    return _Rope.apply(q, k, cos, sin, False)


def _turned(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, transposed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """One launch: q and k turned by the angles, or by the transpose of that rotation."""
    from engine.kernels.rope.kernels import rope_kernel

    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    cos, sin = cos.contiguous(), sin.contiguous()
    batch, time, heads_q, size = q.shape
    shape = heads_q, k.shape[2], size, cos.shape[-1]
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))

    def launch(tile: Tile) -> None:
        grid, per_program = blocks(batch * time, *shape, tile)
        rope_kernel[grid](
            q, k, q_out, k_out, cos, sin, *q.stride()[:3], *k.stride()[:3], time, *angle_strides(cos),
            heads_q, k.shape[2], size, cos.shape[-1] // 2, TRANSPOSED=transposed, **per_program,
        )  # fmt: skip

    key = bucket(batch * time), *shape, str(q.dtype)
    launch(TUNER.pick(TILES, key, q.device, launch) if TUNER.on else TILES.default)
    return q_out, k_out


class _Rope(torch.autograd.Function):
    """The eager path: one autograd node, no dispatch in between."""

    @staticmethod
    def forward(ctx, q, k, cos, sin, transposed):
        ctx.save_for_backward(cos, sin)
        ctx.transposed = transposed
        return _turned(q, k, cos, sin, transposed)

    @staticmethod
    def backward(ctx, dq_out, dk_out):
        return *_Rope.apply(dq_out, dk_out, *ctx.saved_tensors, not ctx.transposed), None, None, None


# The compiled path: a registered operation, which `torch.compile(fullgraph=True)` keeps whole in one graph.
@torch.library.custom_op("workbench::rope", mutates_args=())
def _rope_op(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, transposed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return _turned(q, k, cos, sin, transposed)


@_rope_op.register_fake
def _(q, k, cos, sin, transposed):
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _remember(ctx, inputs, output):
    *_, cos, sin, ctx.transposed = inputs
    ctx.save_for_backward(cos, sin)


def _differentiate(ctx, dq_out, dk_out):
    return *_rope_op(dq_out, dk_out, *ctx.saved_tensors, not ctx.transposed), None, None, None


_rope_op.register_autograd(_differentiate, setup_context=_remember)
