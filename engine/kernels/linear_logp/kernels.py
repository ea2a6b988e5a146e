"""Triton kernels over blocks of logits that a matrix product has just written.

`row_scores_kernel` sees whole rows: it computes what is asked about their targets and can overwrite the logits with the
gradient of the target's log-probability or of its cross-entropy. `slice_scores_kernel` sees a slice of the vocabulary at a
time and adds it to what it keeps of each row; `scores_gradient_kernel` turns a slice into the gradient under given upstream
gradients, in place or elsewhere. Names: N rows, V vocabulary or slice.

With z the logit after scale, cap and temperature, lse = log sum exp z, H = lse - sum p z, and the cross-entropy
C = lse - (1 - s) z_target - s mean z + zeta lse^2 under label smoothing s and z-loss zeta:
    d logp / dz_v = [v == target] - p_v          d H / dz_v = -p_v (z_v - lse + H)
    d C / dz_v = p_v (1 + 2 zeta lse) - (1 - s) [v == target] - s / V
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tanh(u):
    """From exp, exact at both ends: it overflows to inf and gives 1, underflows to 0 and gives -1. Near 0, where a
    difference from 1 would be left of it, by the first terms of its series, whose next is 1e-8 of it."""
    s = u * u
    near = u * (1.0 - s * (0.33333333 - s * (0.13333333 - s * (0.053968254 - s * 0.021869489))))
    return tl.where(s < 0.0625, near, 1.0 - 2.0 / (tl.exp(2.0 * u) + 1.0))


@triton.jit
def _scaled(x, logit_scale, soft_cap, inverse_temperature, HAS_CAP: tl.constexpr):
    """z and dz/dx of raw logits x."""
    z = x * logit_scale
    if HAS_CAP:
        t = _tanh(z / soft_cap)
        return soft_cap * t * inverse_temperature, logit_scale * (1.0 - t * t) * inverse_temperature
    return z * inverse_temperature, tl.full(z.shape, 1.0, tl.float32) * logit_scale * inverse_temperature


@triton.jit
def _fold_words(
    base, target, bias_ptr, V, place, logit_scale, soft_cap, inverse_temperature,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, WITH_ENTROPY: tl.constexpr, WITH_SQUARE: tl.constexpr,
    WITH_SUM: tl.constexpr, WITH_TOP: tl.constexpr, LANES: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """What each lane finds in its own runs of the V words at `base`; lanes meet once, after the loop."""
    high = tl.full([LANES], float("-inf"), tl.float32)
    before = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    weighted = tl.zeros([LANES], tl.float32)
    squared = tl.zeros([LANES], tl.float32)
    summed = tl.zeros([LANES], tl.float32)
    hit = tl.zeros([LANES], tl.float32)
    for start in range(0, V, LANES * RUN):
        words = start + place
        inside = words < V
        x = tl.load(base + words, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            x += tl.load(bias_ptr + words, mask=inside, other=0.0).to(tl.float32)
        z, _ = _scaled(x, logit_scale, soft_cap, inverse_temperature, HAS_CAP)
        hit += tl.sum(tl.where(inside & (words == target), z, 0.0), 1)
        if WITH_SUM:
            summed += tl.sum(tl.where(inside, z, 0.0), 1)
        z = tl.where(inside, z, float("-inf"))
        if WITH_TOP:
            before = tl.maximum(before, tl.max(tl.where(words < target, z, float("-inf")), 1))
        new_high = tl.maximum(high, tl.max(z, 1))
        # A lane may hold -inf only: nothing to rescale then, and (-inf) - (-inf) must not become NaN.
        shift = tl.where(new_high == float("-inf"), 0.0, new_high)
        e = tl.exp(z - shift[:, None])
        rescale = tl.exp(high - shift)
        total = total * rescale + tl.sum(e, 1)
        if WITH_ENTROPY:
            weighted = weighted * rescale + tl.sum(tl.where(e > 0, e * z, 0.0), 1)
        if WITH_SQUARE:
            squared = squared * rescale * rescale + tl.sum(e * e, 1)
        high = new_high
    return high, before, total, weighted, squared, summed, hit


@triton.jit
def slice_scores_kernel(
    logits_ptr, targets_ptr, bias_ptr, state_ptr, stride_n, first_v, V, N, logit_scale, soft_cap, inverse_temperature,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, WITH_ENTROPY: tl.constexpr, WITH_SQUARE: tl.constexpr,
    WITH_SUM: tl.constexpr, WITH_TOP: tl.constexpr, LANES: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """One program a row: the slice that begins at word `first_v` joins what the slices before it left in the state.

    The state is [7, N]: maximum, sum of exponentials, of those times the logit, of their squares, sum of logits, the
    target's logit, the maximum of the words before the target.
    """
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row) - first_v
    place = tl.arange(0, LANES)[:, None] * RUN + tl.arange(0, RUN)[None, :]
    high, before, total, weighted, squared, summed, hit = _fold_words(
        logits_ptr + row * stride_n, target, bias_ptr, V, place, logit_scale, soft_cap, inverse_temperature,
        HAS_BIAS, HAS_CAP, WITH_ENTROPY, WITH_SQUARE, WITH_SUM, WITH_TOP, LANES, RUN,
    )  # fmt: skip
    state = state_ptr + row
    top = tl.max(high, 0)
    # A slice may hold -inf only, where a bias rules its words out: it adds nothing.
    lanes = tl.exp(high - tl.where(top == float("-inf"), 0.0, top))
    older = tl.load(state)
    newer = tl.maximum(older, top)
    shift = tl.where(newer == float("-inf"), 0.0, newer)
    old, new = tl.exp(older - shift), tl.exp(top - shift)
    tl.store(state, newer)
    tl.store(state + N, tl.load(state + N) * old + tl.sum(total * lanes, 0) * new)
    if WITH_ENTROPY:
        tl.store(state + 2 * N, tl.load(state + 2 * N) * old + tl.sum(weighted * lanes, 0) * new)
    if WITH_SQUARE:
        tl.store(state + 3 * N, tl.load(state + 3 * N) * old * old + tl.sum(squared * lanes * lanes, 0) * new * new)
    if WITH_SUM:
        tl.store(state + 4 * N, tl.load(state + 4 * N) + tl.sum(summed, 0))
    tl.store(state + 5 * N, tl.load(state + 5 * N) + tl.sum(hit, 0))
    if WITH_TOP:
        tl.store(state + 6 * N, tl.maximum(tl.load(state + 6 * N), tl.max(before, 0)))


@triton.jit
def row_scores_kernel(
    logits_ptr, targets_ptr, bias_ptr, logp_ptr, lse_ptr, entropy_ptr, square_ptr, mean_ptr, top_ptr, loss_ptr,
    stride_n, V, logit_scale, soft_cap, inverse_temperature, label_smoothing, z_loss,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, WITH_ENTROPY: tl.constexpr, WITH_SQUARE: tl.constexpr,
    WITH_SUM: tl.constexpr, WITH_MEAN: tl.constexpr, WITH_TOP: tl.constexpr, WITH_LOSS: tl.constexpr,
    WITH_GRADIENT: tl.constexpr, WHOLE: tl.constexpr, LANES: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """One program a row; the second read, for the gradient, comes from the cache.

    The gradient is the cross-entropy's where that is asked for, else the log-probability's. WHOLE: the row is the whole
    vocabulary, so a target outside it is a mistake and makes the row NaN; otherwise it lies in another shard. WITH_SUM:
    for the mean or for smoothing.
    """
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row)
    base = logits_ptr + row * stride_n
    place = tl.arange(0, LANES)[:, None] * RUN + tl.arange(0, RUN)[None, :]
    high, before, total, weighted, squared, summed, hit = _fold_words(
        base, target, bias_ptr, V, place, logit_scale, soft_cap, inverse_temperature,
        HAS_BIAS, HAS_CAP, WITH_ENTROPY, WITH_SQUARE, WITH_SUM, WITH_TOP, LANES, RUN,
    )  # fmt: skip
    top = tl.max(high, 0)
    rescale = tl.exp(high - top)
    whole = tl.sum(total * rescale, 0)
    lse = top + tl.log(whole)
    if WHOLE:
        lse = tl.where((target >= 0) & (target < V), lse, float("nan"))
    z_target = tl.sum(hit, 0)
    tl.store(logp_ptr + row, z_target - lse)
    tl.store(lse_ptr + row, lse)
    if WITH_ENTROPY:
        tl.store(entropy_ptr + row, lse - tl.sum(weighted * rescale, 0) / whole)
    if WITH_SQUARE:
        tl.store(square_ptr + row, tl.log(tl.sum(squared * rescale * rescale, 0)) - 2.0 * tl.log(whole))
    if WITH_MEAN:
        tl.store(mean_ptr + row, tl.sum(summed, 0) / V)
    if WITH_TOP:
        # A tie goes to the first word, as argmax has it.
        tl.store(top_ptr + row, (z_target >= top) & (z_target > tl.max(before, 0)))
    if WITH_LOSS:
        loss = lse - (1.0 - label_smoothing) * z_target + z_loss * lse * lse
        if WITH_SUM:
            # A word that cannot come makes the mean infinite, which counts only under smoothing.
            loss -= tl.where(label_smoothing > 0, label_smoothing * (tl.sum(summed, 0) / V), 0.0)
        tl.store(loss_ptr + row, loss)
    if WITH_GRADIENT:
        for start in range(0, V, LANES * RUN):
            words = start + place
            inside = words < V
            x = tl.load(base + words, mask=inside, other=0.0).to(tl.float32)
            if HAS_BIAS:
                x += tl.load(bias_ptr + words, mask=inside, other=0.0).to(tl.float32)
            z, slope = _scaled(x, logit_scale, soft_cap, inverse_temperature, HAS_CAP)
            chosen = tl.where(words == target, 1.0, 0.0)
            p = tl.exp(z - lse)
            if WITH_LOSS:
                gradient = p * (1.0 + 2.0 * z_loss * lse) - (1.0 - label_smoothing) * chosen - label_smoothing / V
            else:
                gradient = chosen - p
            tl.store(base + words, (gradient * slope).to(logits_ptr.dtype.element_ty), mask=inside)


@triton.jit
def scores_gradient_kernel(
    logits_ptr, out_ptr, targets_ptr, bias_ptr, lse_ptr, entropy_ptr, d_logp_ptr, d_entropy_ptr, d_loss_ptr,
    stride_n, out_stride_n, first_v, V, full_v, logit_scale, soft_cap, inverse_temperature, label_smoothing, z_loss,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, WITH_LOGP: tl.constexpr, WITH_ENTROPY: tl.constexpr,
    WITH_LOSS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program a row and block; the slice and its bias begin at word `first_v` of `full_v`; `out` may be the logits."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = offsets < V
    x = tl.load(logits_ptr + row * stride_n + offsets, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    z, slope = _scaled(x, logit_scale, soft_cap, inverse_temperature, HAS_CAP)
    lse = tl.load(lse_ptr + row)
    logp = z - lse
    p = tl.exp(logp)
    gradient = tl.zeros([BLOCK_V], tl.float32)
    chosen = tl.where(first_v + offsets == tl.load(targets_ptr + row), 1.0, 0.0)
    if WITH_LOGP:
        gradient += tl.load(d_logp_ptr + row) * (chosen - p)
    if WITH_LOSS:
        each = p * (1.0 + 2.0 * z_loss * lse) - (1.0 - label_smoothing) * chosen - label_smoothing / full_v
        gradient += tl.load(d_loss_ptr + row) * each
    if WITH_ENTROPY:
        gradient -= tl.where(p > 0, tl.load(d_entropy_ptr + row) * p * (logp + tl.load(entropy_ptr + row)), 0.0)
    tl.store(out_ptr + row * out_stride_n + offsets, (gradient * slope).to(out_ptr.dtype.element_ty), mask=inside)
