"""Triton kernels over blocks of logits that a matrix product has just written.

`row_loss_kernel` sees whole rows: it computes their loss and overwrites the logits with the gradient of the sum of
losses. `slice_statistics_kernel` and `slice_gradient_kernel` see a slice of the vocabulary at a time and share their
work through each row's running maximum and sum. Names: N rows, V vocabulary or slice.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _capped(x, logit_scale, soft_cap, HAS_CAP: tl.constexpr):
    """The logit after scale and cap, and its derivative by the raw logit."""
    z = x * logit_scale
    if HAS_CAP:
        # tanh(u) from exp, exact at both ends: exp overflows to inf and gives 1, underflows to 0 and gives -1.
        t = 1.0 - 2.0 / (tl.exp(2.0 * z / soft_cap) + 1.0)
        return soft_cap * t, logit_scale * (1.0 - t * t)
    return z, tl.full(z.shape, 1.0, tl.float32) * logit_scale


@triton.jit
def slice_statistics_kernel(
    logits_ptr, targets_ptr, bias_ptr, high_ptr, total_ptr, sum_ptr, target_logit_ptr,
    stride_n, first_v, V, ignore_index, logit_scale, soft_cap,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, WITH_SUM: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Folds a slice [N, V] that begins at word `first_v` into each row's maximum, sum of exponentials, target logit."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row)
    if target == ignore_index:
        return
    high = tl.load(high_ptr + row)
    total = tl.load(total_ptr + row)
    summed = 0.0
    offsets = tl.arange(0, BLOCK_V)
    for start in range(0, V, BLOCK_V):
        inside = start + offsets < V
        x = tl.load(logits_ptr + row * stride_n + start + offsets, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            x += tl.load(bias_ptr + first_v + start + offsets, mask=inside, other=0.0).to(tl.float32)
        z, _ = _capped(x, logit_scale, soft_cap, HAS_CAP)
        if WITH_SUM:
            summed += tl.sum(tl.where(inside, z, 0.0), 0)
        z = tl.where(inside, z, float("-inf"))
        new_high = tl.maximum(high, tl.max(z, 0))
        total = total * tl.exp(high - new_high) + tl.sum(tl.exp(z - new_high), 0)
        high = new_high
    tl.store(high_ptr + row, high)
    tl.store(total_ptr + row, total)
    if WITH_SUM:
        tl.store(sum_ptr + row, tl.load(sum_ptr + row) + summed)
    local = target - first_v
    if (local >= 0) & (local < V):
        x = tl.load(logits_ptr + row * stride_n + local).to(tl.float32)
        if HAS_BIAS:
            x += tl.load(bias_ptr + target).to(tl.float32)
        if HAS_CAP:
            x = soft_cap * (1.0 - 2.0 / (tl.exp(2.0 * x * logit_scale / soft_cap) + 1.0))
        else:
            x = x * logit_scale
        tl.store(target_logit_ptr + row, x)


@triton.jit
def slice_gradient_kernel(
    logits_ptr, out_ptr, targets_ptr, bias_ptr, lse_ptr, scale_ptr, stride_n, out_stride_n, first_v, V, full_v,
    ignore_index, logit_scale, soft_cap, label_smoothing, z_loss,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Writes d(sum of losses) * scale / d(raw logits) of a slice; `out` may be the logits. Ignored rows get zeros."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = offsets < V
    out = out_ptr + row * out_stride_n + offsets
    target = tl.load(targets_ptr + row)
    if target == ignore_index:
        tl.store(out, tl.zeros([BLOCK_V], out_ptr.dtype.element_ty), mask=inside)
        return
    x = tl.load(logits_ptr + row * stride_n + offsets, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias_ptr + first_v + offsets, mask=inside, other=0.0).to(tl.float32)
    z, slope = _capped(x, logit_scale, soft_cap, HAS_CAP)
    lse = tl.load(lse_ptr + row)
    p = tl.exp(z - lse)
    gradient = p * (1.0 + 2.0 * z_loss * lse) - label_smoothing / full_v
    gradient -= tl.where(first_v + offsets == target, 1.0 - label_smoothing, 0.0)
    gradient = gradient * slope * tl.load(scale_ptr)
    tl.store(out, gradient.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def row_loss_kernel(
    logits_ptr, targets_ptr, bias_ptr, loss_ptr, scale_ptr, stride_n, V, ignore_index,
    logit_scale, soft_cap, label_smoothing, z_loss,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SMOOTHING: tl.constexpr, WITH_GRADIENT: tl.constexpr,
    LANES: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Loss of one whole row, and its logits overwritten by their gradient; the second read comes from the cache."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, LANES)
    offsets = lanes[:, None] * RUN + tl.arange(0, RUN)[None, :]
    base = logits_ptr + row * stride_n
    target = tl.load(targets_ptr + row)
    if target == ignore_index:
        tl.store(loss_ptr + row, 0.0)
        if WITH_GRADIENT:
            for start in range(0, V, LANES * RUN):
                zeros = tl.zeros([LANES, RUN], logits_ptr.dtype.element_ty)
                tl.store(base + start + offsets, zeros, mask=start + offsets < V)
        return
    # Each lane folds its own runs; lanes meet once, after the loop.
    high = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    summed = tl.zeros([LANES], tl.float32)
    for start in range(0, V, LANES * RUN):
        inside = start + offsets < V
        x = tl.load(base + start + offsets, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            x += tl.load(bias_ptr + start + offsets, mask=inside, other=0.0).to(tl.float32)
        z, _ = _capped(x, logit_scale, soft_cap, HAS_CAP)
        if HAS_SMOOTHING:
            summed += tl.sum(tl.where(inside, z, 0.0), 1)
        z = tl.where(inside, z, float("-inf"))
        new_high = tl.maximum(high, tl.max(z, 1))
        shift = tl.where(new_high == float("-inf"), 0.0, new_high)
        total = total * tl.exp(high - shift) + tl.sum(tl.exp(z - shift[:, None]), 1)
        high = new_high
    top = tl.max(high, 0)
    lse = top + tl.log(tl.sum(total * tl.exp(high - top), 0))
    # A target outside the vocabulary makes its row NaN: a wrong number would go unseen.
    known = (target >= 0) & (target < V)
    x_target = tl.load(base + target, mask=known, other=float("nan")).to(tl.float32)
    if HAS_BIAS:
        x_target += tl.load(bias_ptr + target, mask=known, other=0.0).to(tl.float32)
    z_target = x_target * logit_scale
    if HAS_CAP:
        z_target = soft_cap * (1.0 - 2.0 / (tl.exp(2.0 * z_target / soft_cap) + 1.0))
    loss = lse - (1.0 - label_smoothing) * z_target + z_loss * lse * lse
    if HAS_SMOOTHING:
        loss -= label_smoothing * tl.sum(summed, 0) / V
    tl.store(loss_ptr + row, loss)
    if WITH_GRADIENT:
        scale = tl.load(scale_ptr)
        for start in range(0, V, LANES * RUN):
            inside = start + offsets < V
            x = tl.load(base + start + offsets, mask=inside, other=0.0).to(tl.float32)
            if HAS_BIAS:
                x += tl.load(bias_ptr + start + offsets, mask=inside, other=0.0).to(tl.float32)
            z, slope = _capped(x, logit_scale, soft_cap, HAS_CAP)
            gradient = tl.exp(z - lse) * (1.0 + 2.0 * z_loss * lse) - label_smoothing / V
            gradient -= tl.where(start + offsets == target, 1.0 - label_smoothing, 0.0)
            tl.store(base + start + offsets, (gradient * slope * scale).to(logits_ptr.dtype.element_ty), mask=inside)


@triton.jit
def scale_kernel(x_ptr, scale_ptr, count, BLOCK: tl.constexpr):
    """Multiplies in place by a scalar on the device; a scalar of one costs neither read nor write."""
    scale = tl.load(scale_ptr)
    if scale == 1.0:
        return
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0)
    tl.store(x_ptr + offsets, (x.to(tl.float32) * scale).to(x_ptr.dtype.element_ty), mask=inside)
