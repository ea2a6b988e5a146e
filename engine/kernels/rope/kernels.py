"""Triton kernel: rotary embedding of all q and k heads of a token in one launch, or its transpose, which is the gradient.

A program owns some heads of one token and reads the halves of their rotated part, which so meet without a shuffle; cos and
sin are read once a program. Names: H heads, D head size, R rotated size, F = R / 2.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _turn_heads(
    x_ptr, stride_h, out_ptr, c1, c2, s1, s2, first, H, D, F,
    HAS_TAIL: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_TAIL: tl.constexpr,
):  # fmt: skip
    heads = first + tl.arange(0, BLOCK_H)[:, None]
    half = tl.arange(0, BLOCK_F)[None, :]
    x_ptr += heads.to(tl.int64) * stride_h
    out_ptr += heads * D
    mask = (heads < H) & (half < F)
    x1 = tl.load(x_ptr + half, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + half + F, mask=mask, other=0.0).to(tl.float32)
    if TRANSPOSED:
        y1, y2 = x1 * c1 + x2 * s2, x2 * c2 - x1 * s1
    else:
        y1, y2 = x1 * c1 - x2 * s1, x2 * c2 + x1 * s2
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + half, y1.to(dtype), mask=mask)
    tl.store(out_ptr + half + F, y2.to(dtype), mask=mask)
    if HAS_TAIL:
        tail = 2 * F + tl.arange(0, BLOCK_TAIL)[None, :]
        tail_mask = (heads < H) & (tail < D)
        tl.store(out_ptr + tail, tl.load(x_ptr + tail, mask=tail_mask, other=0.0), mask=tail_mask)


@triton.jit
def rope_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h, time, cos_stride_b, cos_stride_t,
    HQ, HK, D, F,
    HAS_TAIL: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK_HQ: tl.constexpr, BLOCK_HK: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_TAIL: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, blocks of q heads and then of k heads), so that the few k heads fill their own programs."""
    token = tl.program_id(0).to(tl.int64)
    row, step = token // time, token % time
    half = tl.arange(0, BLOCK_F)[None, :]
    inside = half < F
    cos_ptr += row * cos_stride_b + step * cos_stride_t
    sin_ptr += row * cos_stride_b + step * cos_stride_t
    c1 = tl.load(cos_ptr + half, mask=inside, other=0.0).to(tl.float32)
    c2 = tl.load(cos_ptr + half + F, mask=inside, other=0.0).to(tl.float32)
    s1 = tl.load(sin_ptr + half, mask=inside, other=0.0).to(tl.float32)
    s2 = tl.load(sin_ptr + half + F, mask=inside, other=0.0).to(tl.float32)
    block, q_blocks = tl.program_id(1), tl.cdiv(HQ, BLOCK_HQ)
    if block < q_blocks:
        _turn_heads(
            q_ptr + row * q_stride_b + step * q_stride_t, q_stride_h, q_out_ptr + token * HQ * D,
            c1, c2, s1, s2, block * BLOCK_HQ, HQ, D, F, HAS_TAIL, TRANSPOSED, BLOCK_HQ, BLOCK_F, BLOCK_TAIL,
        )  # fmt: skip
    else:
        _turn_heads(
            k_ptr + row * k_stride_b + step * k_stride_t, k_stride_h, k_out_ptr + token * HK * D,
            c1, c2, s1, s2, (block - q_blocks) * BLOCK_HK, HK, D, F, HAS_TAIL, TRANSPOSED, BLOCK_HK, BLOCK_F, BLOCK_TAIL,
        )  # fmt: skip
