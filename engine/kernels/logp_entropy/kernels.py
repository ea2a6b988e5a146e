"""Triton kernels: one read of the logits gives log-probability, entropy and the statistics that backward needs.

Names: R rows (batch x time, addressed by two strides so that a sliced view is not copied), V vocabulary.
With z = x / temperature, lse = log sum exp z and H = lse - sum p z:
    d logp / dz_v = [v == target] - p_v          d H / dz_v = -p_v (z_v - lse + H)
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def logp_entropy_fwd_kernel(
    logits_ptr, targets_ptr, logp_ptr, entropy_ptr, lse_ptr,
    time, V, stride_b, stride_t, stride_v, scale, ignore_index,
    WITH_ENTROPY: tl.constexpr, WIDE: tl.constexpr, LANES: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """One program a row. `scale` is log2(e) / temperature: the loop works in base 2.

    WIDE: words of one row lie 2^31 elements apart, so places in it take 64 bits. Rows are always addressed by 64.
    """
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row)
    if target == ignore_index:
        tl.store(logp_ptr + row, 0.0)
        tl.store(lse_ptr + row, 0.0)
        if WITH_ENTROPY:
            tl.store(entropy_ptr + row, 0.0)
        return
    base = logits_ptr + (row // time) * stride_b + (row % time) * stride_t
    # Each lane folds its own runs of RUN words: maximum and sums meet across lanes once, after the loop.
    lanes = tl.arange(0, LANES)
    if WIDE:
        lanes = lanes.to(tl.int64)
    place = lanes[:, None] * RUN + tl.arange(0, RUN)[None, :]
    high = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    weighted = tl.zeros([LANES], tl.float32)
    for start in range(0, V, LANES * RUN):
        words = start + place
        z = tl.load(base + words * stride_v, mask=words < V, other=float("-inf")).to(tl.float32) * scale
        new_high = tl.maximum(high, tl.max(z, 1))
        # A lane may hold -inf only: nothing to rescale then, and (-inf) - (-inf) must not become NaN.
        shift = tl.where(new_high == float("-inf"), 0.0, new_high)
        e = tl.exp2(z - shift[:, None])
        rescale = tl.exp2(high - shift)
        total = total * rescale + tl.sum(e, 1)
        if WITH_ENTROPY:
            weighted = weighted * rescale + tl.sum(tl.where(e > 0, e * z, 0.0), 1)
        high = new_high
    top = tl.max(high, 0)
    rescale = tl.exp2(high - top)
    whole = tl.sum(total * rescale, 0)
    lse = top + tl.log2(whole)
    # A target outside the vocabulary makes its row NaN: a wrong number would go unseen.
    known = (target >= 0) & (target < V)
    z_target = tl.load(base + target * stride_v, mask=known, other=float("nan")).to(tl.float32) * scale
    tl.store(logp_ptr + row, (z_target - lse) * LN2)
    tl.store(lse_ptr + row, lse)
    if WITH_ENTROPY:
        tl.store(entropy_ptr + row, (lse - tl.sum(weighted * rescale, 0) / whole) * LN2)


@triton.jit
def logp_entropy_bwd_kernel(
    logits_ptr, targets_ptr, lse_ptr, entropy_ptr, dlogp_ptr, dentropy_ptr, out_ptr,
    time, V, stride_b, stride_t, stride_v, out_stride_b, out_stride_t, out_stride_v, scale, inverse_temperature,
    ignore_index, WITH_ENTROPY: tl.constexpr, WIDE: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program a row and block of the vocabulary; `out` may be the logits themselves. WIDE as in the forward pass."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    if WIDE:
        offsets = offsets.to(tl.int64)
    inside = offsets < V
    batch, step = row // time, row % time
    out = out_ptr + batch * out_stride_b + step * out_stride_t + offsets * out_stride_v
    target = tl.load(targets_ptr + row)
    if target == ignore_index:
        tl.store(out, tl.zeros([BLOCK_V], out_ptr.dtype.element_ty), mask=inside)
        return
    x = tl.load(logits_ptr + batch * stride_b + step * stride_t + offsets * stride_v, mask=inside, other=float("-inf"))
    lse = tl.load(lse_ptr + row)
    dlogp = tl.load(dlogp_ptr + row) * inverse_temperature
    log2p = x.to(tl.float32) * scale - lse
    p = tl.exp2(log2p)
    gradient = tl.where(offsets == target, dlogp, 0.0) - dlogp * p
    if WITH_ENTROPY:
        dentropy = tl.load(dentropy_ptr + row) * inverse_temperature
        entropy = tl.load(entropy_ptr + row)
        gradient -= tl.where(p > 0, dentropy * p * (log2p * LN2 + entropy), 0.0)
    tl.store(out, gradient.to(out_ptr.dtype.element_ty), mask=inside)
