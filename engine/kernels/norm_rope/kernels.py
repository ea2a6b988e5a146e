"""Triton kernels: RMSNorm and rotary embedding of all q and k heads of a token in one launch each way.

A program owns some heads of one token and reads them as three column groups: first and second half of the rotated part,
and the part that is not rotated. The halves meet without a shuffle, and cos and sin are read once a program.
Names: H heads, D head size, R rotated size, F = R / 2.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load_weight(weight_ptr, columns, inside, HAS_WEIGHT: tl.constexpr, UNIT_OFFSET: tl.constexpr):
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        if UNIT_OFFSET:
            weight += 1.0
    else:
        weight = tl.full(columns.shape, 1.0, tl.float32)
    return weight


@triton.jit
def _forward_heads(
    x_ptr, out_ptr, weight_ptr, c1, c2, s1, s2, first, H, D, F, eps,
    HAS_WEIGHT: tl.constexpr, UNIT_OFFSET: tl.constexpr, HAS_TAIL: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_TAIL: tl.constexpr,
):  # fmt: skip
    heads = first + tl.arange(0, BLOCK_H)
    half = tl.arange(0, BLOCK_F)
    in_half = half < F
    place = heads[:, None] * D + half[None, :]
    mask = (heads[:, None] < H) & in_half[None, :]
    x1 = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + place + F, mask=mask, other=0.0).to(tl.float32)
    square = tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)
    if HAS_TAIL:
        tail = 2 * F + tl.arange(0, BLOCK_TAIL)
        tail_place = heads[:, None] * D + tail[None, :]
        tail_mask = (heads[:, None] < H) & (tail[None, :] < D)
        x3 = tl.load(x_ptr + tail_place, mask=tail_mask, other=0.0).to(tl.float32)
        square += tl.sum(x3 * x3, 1)
    rstd = tl.rsqrt(square / D + eps)[:, None]
    y1 = x1 * rstd * _load_weight(weight_ptr, half, in_half, HAS_WEIGHT, UNIT_OFFSET)[None, :]
    y2 = x2 * rstd * _load_weight(weight_ptr, half + F, in_half, HAS_WEIGHT, UNIT_OFFSET)[None, :]
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + place, (y1 * c1 - y2 * s1).to(dtype), mask=mask)
    tl.store(out_ptr + place + F, (y2 * c2 + y1 * s2).to(dtype), mask=mask)
    if HAS_TAIL:
        y3 = x3 * rstd * _load_weight(weight_ptr, tail, tail < D, HAS_WEIGHT, UNIT_OFFSET)[None, :]
        tl.store(out_ptr + tail_place, y3.to(dtype), mask=tail_mask)


@triton.jit
def _backward_heads(
    x_ptr, dy_ptr, dx_ptr, weight_ptr, dweight_ptr, c1, c2, s1, s2, first, dy_stride_h, H, D, F, eps,
    HAS_WEIGHT: tl.constexpr, UNIT_OFFSET: tl.constexpr, HAS_TAIL: tl.constexpr, WITH_DWEIGHT: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_TAIL: tl.constexpr,
):  # fmt: skip
    heads = first + tl.arange(0, BLOCK_H)
    half = tl.arange(0, BLOCK_F)
    in_half = half < F
    place = heads[:, None] * D + half[None, :]
    dy_place = heads[:, None].to(tl.int64) * dy_stride_h + half[None, :]
    mask = (heads[:, None] < H) & in_half[None, :]
    x1 = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + place + F, mask=mask, other=0.0).to(tl.float32)
    do1 = tl.load(dy_ptr + dy_place, mask=mask, other=0.0).to(tl.float32)
    do2 = tl.load(dy_ptr + dy_place + F, mask=mask, other=0.0).to(tl.float32)
    w1 = _load_weight(weight_ptr, half, in_half, HAS_WEIGHT, UNIT_OFFSET)[None, :]
    w2 = _load_weight(weight_ptr, half + F, in_half, HAS_WEIGHT, UNIT_OFFSET)[None, :]
    # The rotation's transpose first: gradients of the normalised and scaled halves.
    dy1 = do1 * c1 + do2 * s2
    dy2 = do2 * c2 - do1 * s1
    square = tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)
    inner = tl.sum(x1 * dy1 * w1, 1) + tl.sum(x2 * dy2 * w2, 1)
    if HAS_TAIL:
        tail = 2 * F + tl.arange(0, BLOCK_TAIL)
        tail_place = heads[:, None] * D + tail[None, :]
        tail_mask = (heads[:, None] < H) & (tail[None, :] < D)
        x3 = tl.load(x_ptr + tail_place, mask=tail_mask, other=0.0).to(tl.float32)
        dy_tail = heads[:, None].to(tl.int64) * dy_stride_h + tail[None, :]
        dy3 = tl.load(dy_ptr + dy_tail, mask=tail_mask, other=0.0).to(tl.float32)
        w3 = _load_weight(weight_ptr, tail, tail < D, HAS_WEIGHT, UNIT_OFFSET)[None, :]
        square += tl.sum(x3 * x3, 1)
        inner += tl.sum(x3 * dy3 * w3, 1)
    rstd = tl.rsqrt(square / D + eps)
    lean = (inner * rstd * rstd / D)[:, None]
    rstd = rstd[:, None]
    dtype = dx_ptr.dtype.element_ty
    tl.store(dx_ptr + place, (rstd * (w1 * dy1 - x1 * lean)).to(dtype), mask=mask)
    tl.store(dx_ptr + place + F, (rstd * (w2 * dy2 - x2 * lean)).to(dtype), mask=mask)
    if WITH_DWEIGHT:
        tl.atomic_add(dweight_ptr + half, tl.sum(dy1 * x1 * rstd, 0), mask=in_half, sem="relaxed")
        tl.atomic_add(dweight_ptr + half + F, tl.sum(dy2 * x2 * rstd, 0), mask=in_half, sem="relaxed")
    if HAS_TAIL:
        tl.store(dx_ptr + tail_place, (rstd * (w3 * dy3 - x3 * lean)).to(dtype), mask=tail_mask)
        if WITH_DWEIGHT:
            tl.atomic_add(dweight_ptr + tail, tl.sum(dy3 * x3 * rstd, 0), mask=tail < D, sem="relaxed")


@triton.jit
def _angles(cos_ptr, sin_ptr, F, BLOCK_F: tl.constexpr):
    half = tl.arange(0, BLOCK_F)
    inside = half < F
    c1 = tl.load(cos_ptr + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    c2 = tl.load(cos_ptr + half + F, mask=inside, other=0.0).to(tl.float32)[None, :]
    s1 = tl.load(sin_ptr + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    s2 = tl.load(sin_ptr + half + F, mask=inside, other=0.0).to(tl.float32)[None, :]
    return c1, c2, s1, s2


@triton.jit
def norm_rope_fwd_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr,
    q_stride, k_stride, time, cos_stride_b, cos_stride_t, HQ, HK, D, F, eps,
    HAS_WEIGHT: tl.constexpr, UNIT_OFFSET: tl.constexpr, HAS_TAIL: tl.constexpr,
    BLOCK_HQ: tl.constexpr, BLOCK_HK: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_TAIL: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, blocks of q heads and then of k heads), so that the few k heads fill their own programs."""
    token = tl.program_id(0).to(tl.int64)
    angle = (token // time) * cos_stride_b + (token % time) * cos_stride_t
    c1, c2, s1, s2 = _angles(cos_ptr + angle, sin_ptr + angle, F, BLOCK_F)
    block, q_blocks = tl.program_id(1), tl.cdiv(HQ, BLOCK_HQ)
    if block < q_blocks:
        _forward_heads(
            q_ptr + token * q_stride, q_out_ptr + token * HQ * D, q_weight_ptr, c1, c2, s1, s2,
            block * BLOCK_HQ, HQ, D, F, eps,
            HAS_WEIGHT, UNIT_OFFSET, HAS_TAIL, BLOCK_HQ, BLOCK_F, BLOCK_TAIL,
        )  # fmt: skip
    else:
        _forward_heads(
            k_ptr + token * k_stride, k_out_ptr + token * HK * D, k_weight_ptr, c1, c2, s1, s2,
            (block - q_blocks) * BLOCK_HK, HK, D, F, eps,
            HAS_WEIGHT, UNIT_OFFSET, HAS_TAIL, BLOCK_HK, BLOCK_F, BLOCK_TAIL,
        )  # fmt: skip


@triton.jit
def norm_rope_bwd_kernel(
    q_ptr, k_ptr, dq_out_ptr, dk_out_ptr, dq_ptr, dk_ptr, q_weight_ptr, k_weight_ptr, dq_weight_ptr, dk_weight_ptr,
    cos_ptr, sin_ptr, q_stride, k_stride, dq_stride_b, dq_stride_t, dq_stride_h, dk_stride_b, dk_stride_t, dk_stride_h,
    time, cos_stride_b, cos_stride_t, HQ, HK, D, F, eps, partial_sums,
    HAS_WEIGHT: tl.constexpr, UNIT_OFFSET: tl.constexpr, HAS_TAIL: tl.constexpr, WITH_DWEIGHT: tl.constexpr,
    BLOCK_HQ: tl.constexpr, BLOCK_HK: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_TAIL: tl.constexpr,
):  # fmt: skip
    """As forward; the gradients that come in lie as they do: attention gives them token by token or head by head. Weight gradients go into one of `partial_sums` rows each, to keep the additions apart.

    With as many rows as programs no two meet, and the sums do not depend on the order in which programs end.
    """
    token = tl.program_id(0).to(tl.int64)
    row, at = token // time, token % time
    angle = row * cos_stride_b + at * cos_stride_t
    c1, c2, s1, s2 = _angles(cos_ptr + angle, sin_ptr + angle, F, BLOCK_F)
    block, q_blocks = tl.program_id(1), tl.cdiv(HQ, BLOCK_HQ)
    part = ((token * tl.num_programs(1) + block) % partial_sums) * D
    if block < q_blocks:
        _backward_heads(
            q_ptr + token * q_stride, dq_out_ptr + row * dq_stride_b + at * dq_stride_t, dq_ptr + token * HQ * D,
            q_weight_ptr, dq_weight_ptr + part, c1, c2, s1, s2, block * BLOCK_HQ, dq_stride_h, HQ, D, F, eps,
            HAS_WEIGHT, UNIT_OFFSET, HAS_TAIL, WITH_DWEIGHT, BLOCK_HQ, BLOCK_F, BLOCK_TAIL,
        )  # fmt: skip
    else:
        _backward_heads(
            k_ptr + token * k_stride, dk_out_ptr + row * dk_stride_b + at * dk_stride_t, dk_ptr + token * HK * D,
            k_weight_ptr, dk_weight_ptr + part, c1, c2, s1, s2, (block - q_blocks) * BLOCK_HK, dk_stride_h, HK, D, F, eps,
            HAS_WEIGHT, UNIT_OFFSET, HAS_TAIL, WITH_DWEIGHT, BLOCK_HK, BLOCK_F, BLOCK_TAIL,
        )  # fmt: skip
