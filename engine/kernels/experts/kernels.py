"""Triton kernels: tokens sorted by expert, grouped products with adapters and gates around them, grouped Gram products.

Rows are sorted by expert, and tiles of rows belong to one expert each; a tile map made on the device says to which, so
that no launch waits for the host. Where an expert's last tile is not full, its last row is computed again and not stored.
Names: S slots (tokens times top-k), E experts, `row` a place in the order of experts, `slot` in that of tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.experts.decoding import decoded_tile, in_lanes
from engine.kernels.gated.kernels import _share, _slope

CLAMPED = tl.constexpr(3)


@triton.jit
def count_kernel(ids_ptr, counts_ptr, slots, experts, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """How many of each run of BLOCK slots go to each expert: counts [runs, E]. Grid (runs,)."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids_ptr + slot, mask=slot < slots, other=-1)
    known = (expert >= 0) & (expert < experts)
    counts = tl.histogram(tl.where(known, expert, 0).to(tl.int32), BINS, mask=known)
    bins = tl.arange(0, BINS)
    tl.store(counts_ptr + tl.program_id(0) * experts + bins, counts, mask=bins < experts)


@triton.jit
def plan_kernel(
    counts_ptr, before_ptr, starts_ptr, tile_ends_ptr, runs, experts,
    BINS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """`before` [runs, E]: counts of all runs before; `starts` [E + 1] of each expert's rows, ends [E] of its tiles. One program.

    Where there are fewer counts than threads, several warps read the same ones, so they are not written over.
    """
    bins = tl.arange(0, BINS)
    total = tl.zeros([BINS], tl.int32)
    for first in range(0, runs, CHUNK):
        run = first + tl.arange(0, CHUNK)
        inside = (run < runs)[:, None] & (bins < experts)[None, :]
        place = run[:, None] * experts + bins[None, :]
        counts = tl.load(counts_ptr + place, mask=inside, other=0)
        tl.store(before_ptr + place, tl.cumsum(counts, axis=0) - counts + total[None, :], mask=inside)
        total += tl.sum(counts, axis=0)
    ends = tl.cumsum(total, axis=0)
    tl.store(starts_ptr + bins, ends - total, mask=bins < experts)
    tl.store(starts_ptr + experts, tl.sum(total, axis=0))
    tl.store(tile_ends_ptr + bins, tl.cumsum((total + ROWS - 1) // ROWS, axis=0), mask=bins < experts)


@triton.jit
def place_kernel(
    ids_ptr, before_ptr, starts_ptr, tile_ends_ptr, order_ptr, tile_expert_ptr, tile_row_ptr, slots, experts, tiles, each,
    BINS: tl.constexpr, BLOCK: tl.constexpr, RUN: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """`order` [S]: the slot of each row. `tile_expert`, `tile_row`: of each tile, E where there is none. Grid (S / RUN,)."""
    pid = tl.program_id(0)
    slot = pid * RUN + tl.arange(0, RUN)
    expert = tl.load(ids_ptr + slot, mask=slot < slots, other=-1)
    known = (expert >= 0) & (expert < experts)
    expert = tl.where(known, expert, 0).to(tl.int32)
    before = tl.zeros([RUN], tl.int32)
    block = pid * RUN // BLOCK
    for first in range(block * BLOCK, pid * RUN + RUN, 32):
        other = first + tl.arange(0, 32)
        theirs = tl.load(ids_ptr + other, mask=other < slots, other=-1)
        theirs = tl.where((theirs >= 0) & (theirs < experts), theirs, -1).to(tl.int32)
        same = (theirs[None, :] == expert[:, None]) & (other[None, :] < slot[:, None])
        before += tl.sum(same.to(tl.int32), axis=1)
    row = tl.load(starts_ptr + expert) + tl.load(before_ptr + block * experts + expert) + before
    tl.store(order_ptr + row, slot, mask=known)
    bins = tl.arange(0, BINS)
    ends = tl.load(tile_ends_ptr + bins, mask=bins < experts, other=2147483647)
    for first in range(pid * each, pid * each + each, TILES):
        tile = first + tl.arange(0, TILES)
        owner = tl.sum((ends[None, :] <= tile[:, None]).to(tl.int32), axis=1)
        there = owner < experts
        begun = tl.load(tile_ends_ptr + owner - 1, mask=there & (owner > 0), other=0)
        top = tl.load(starts_ptr + owner, mask=there, other=0) + (tile - begun) * ROWS
        tl.store(tile_expert_ptr + tile, owner, mask=tile < tiles)
        tl.store(tile_row_ptr + tile, top, mask=tile < tiles)


@triton.jit
def _far(place, WIDE: tl.constexpr):
    """A place that offsets are made of; WIDE where these may lie beyond 2^31 numbers."""
    return place.to(tl.int64) if WIDE else place


@triton.jit
def _dot(x, w, acc, PRECISION: tl.constexpr):
    """`acc + x @ w`; the interpreter multiplies 16-bit numbers as float32 alone."""
    if PRECISION == "widened":
        acc = tl.dot(x.to(tl.float32), w.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _place(pid, tiles, blocks, GROUP: tl.constexpr):
    """The tile of rows and the block of columns: GROUP tiles go through the columns side by side and share them in L2."""
    first = pid // (GROUP * blocks) * GROUP
    size = tl.minimum(tiles - first, GROUP)
    within = pid - first * blocks
    return first + within % size, within // size


@triton.jit
def _columns(places, there, FULL: tl.constexpr):
    """Rows of numbers from `places`, zero in columns that are not there."""
    return tl.load(places) if FULL else tl.load(places, mask=there[None, :], other=0.0)


@triton.jit
def _weight(w, expert, w_expert, w_column, w_inner, n, k, WIDE: tl.constexpr):
    """Pointers [K, N] to an expert's weight."""
    return w + _far(expert, WIDE) * w_expert + _far(n, WIDE)[None, :] * w_column + _far(k, WIDE)[:, None] * w_inner


@triton.jit
def _product(
    acc, x_ptrs, real, w, expert, n, there, first, columns, depth, w_rows, w_expert, w_column, w_inner,
    EVEN: tl.constexpr, FULL: tl.constexpr, HALVES: tl.constexpr, BY_COLUMN: tl.constexpr, TMA: tl.constexpr,
    PACKED: tl.constexpr, BLOCK: tl.constexpr, SCALE_BLOCK: tl.constexpr, LANES: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`acc` and the product of rows with columns `n` of an expert's weight, of which those `there` count.

    `w` is a pointer or a descriptor of tiles from column `first` on; with HALVES those of both halves of the columns. Of a
    PACKED weight it is the parts that it is held in, whose tiles are decoded one after the other.
    """
    k = tl.arange(0, DEPTH)
    if PACKED != "":
        table = in_lanes(w[4]) if LANES else w[4]
        line = tl.minimum(n, columns - 1)
        for at in range(0, depth, DEPTH):
            x = tl.load(x_ptrs, mask=real[:, None], other=0.0)
            if BY_COLUMN:
                w_tile = decoded_tile(
                    w, table, expert, line, at, columns, depth, x.dtype, COLUMNS, DEPTH, PACKED, BLOCK, SCALE_BLOCK, LANES
                ).T  # fmt: skip
            else:
                w_tile = decoded_tile(
                    w, table, expert, at + k, first, depth, columns, x.dtype, DEPTH, COLUMNS, PACKED, BLOCK, SCALE_BLOCK, LANES
                )  # fmt: skip
            acc = _dot(x, w_tile, acc, PRECISION)
            x_ptrs += DEPTH
    elif TMA:
        for at in range(0, depth, DEPTH):
            x = tl.load(x_ptrs, mask=real[:, None], other=0.0)
            if HALVES:
                w_tile = w.load([expert, 0, first, at]).reshape(COLUMNS, DEPTH).T
            elif BY_COLUMN:
                w_tile = w.load([expert * w_rows + first, at]).T
            else:
                w_tile = w.load([expert * w_rows + at, first])
            acc = _dot(x, w_tile, acc, PRECISION)
            x_ptrs += DEPTH
    else:
        w_ptrs = _weight(w, expert, w_expert, w_column, w_inner, n, k, WIDE)
        for at in range(0, depth, DEPTH):
            if EVEN:
                x = tl.load(x_ptrs, mask=real[:, None], other=0.0)
                w_tile = _columns(w_ptrs, there, FULL)
            else:
                x = tl.load(x_ptrs, mask=real[:, None] & (at + k < depth)[None, :], other=0.0)
                w_tile = tl.load(w_ptrs, mask=(at + k < depth)[:, None] & there[None, :], other=0.0)
            acc = _dot(x, w_tile, acc, PRECISION)
            x_ptrs += DEPTH
            w_ptrs += DEPTH * w_inner
    return acc


@triton.jit
def _adapted(
    acc, inner_ptr, row, b_ptr, expert, n, there, rank, b_expert, b_column, b_rank,
    RANK: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`acc` and the product of what an adapter made of the rows, [S, rank], with its second matrix."""
    r = tl.arange(0, RANK)
    inner = tl.load(inner_ptr + _far(row, WIDE)[:, None] * rank + r[None, :], mask=(r < rank)[None, :], other=0.0)
    places = b_ptr + _far(expert, WIDE) * b_expert + r[:, None] * b_rank + n[None, :] * b_column
    b = tl.load(places, mask=(r < rank)[:, None] & there[None, :], other=0.0).to(inner.dtype)
    return _dot(inner, b, acc, PRECISION)


@triton.jit
def _opened(gate, up, limit, alpha, ACTIVATION: tl.constexpr):
    """What goes down of gate and up."""
    if ACTIVATION == CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        found = gate * tl.sigmoid(alpha * gate) * (up + 1.0)
    else:
        found = gate * _share(gate, ACTIVATION) * up
    return found


@triton.jit
def _slopes(gate, up, limit, alpha, ACTIVATION: tl.constexpr):
    """What goes down, and its derivatives by gate and by up."""
    if ACTIVATION == CLAMPED:
        held = tl.minimum(gate, limit)
        lifted = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        share = tl.sigmoid(alpha * held)
        act = held * share
        by_gate = tl.where(gate <= limit, lifted * share * (1.0 + alpha * held * (1.0 - share)), 0.0)
        by_up = tl.where((up >= -limit) & (up <= limit), act, 0.0)
        found = act * lifted
    else:
        share = _share(gate, ACTIVATION)
        by_up = gate * share
        by_gate = up * _slope(gate, share, ACTIVATION)
        found = by_up * up
    return found, by_gate, by_up


@triton.jit
def inner_kernel(
    x_ptr, a_ptr, bias_ptr, order_ptr, tile_expert_ptr, tile_row_ptr, starts_ptr, out_ptr, dots_ptr,
    experts, depth, rank, top_k, x_row, a_expert, a_rank, a_inner, scale,
    GATHERED: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, DEPTH: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`scale * x @ A_e.T` [S, rank] and, with a bias, `x @ bias_e` [S] by slot. Grid (tiles * PARTS,), ROWS rows a part."""
    tile = tl.program_id(0) // PARTS
    expert = tl.load(tile_expert_ptr + tile)
    if expert >= experts:
        return
    first = tl.load(tile_row_ptr + tile) + (tl.program_id(0) % PARTS) * ROWS
    end = tl.load(starts_ptr + expert + 1)
    if first >= end:
        return
    row = first + tl.arange(0, ROWS)
    real = row < end
    row = tl.minimum(row, end - 1)
    slot = tl.load(order_ptr + row)
    source = _far(slot // top_k if GATHERED else row, WIDE)
    k, r = tl.arange(0, DEPTH), tl.arange(0, RANK)
    x_ptrs = x_ptr + source[:, None] * x_row + k[None, :]
    r_held = tl.minimum(r, rank - 1)
    a_ptrs = a_ptr + _far(expert, WIDE) * a_expert + r_held[None, :] * a_rank + k[:, None] * a_inner
    acc = tl.zeros([ROWS, RANK], tl.float32)
    dots = tl.zeros([ROWS], tl.float32)
    for at in range(0, depth, DEPTH):
        if EVEN:
            x, a = tl.load(x_ptrs, mask=real[:, None], other=0.0), tl.load(a_ptrs)
        else:
            x = tl.load(x_ptrs, mask=real[:, None] & (at + k < depth)[None, :], other=0.0)
            a = tl.load(a_ptrs, mask=(at + k < depth)[:, None], other=0.0)
        acc = _dot(x, a.to(x.dtype), acc, PRECISION)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + _far(expert, WIDE) * depth + at + k, mask=at + k < depth, other=0.0)
            dots += tl.sum(x.to(tl.float32) * bias.to(tl.float32)[None, :], axis=1)
        x_ptrs += DEPTH
        a_ptrs += DEPTH * a_inner
    place = out_ptr + _far(row, WIDE)[:, None] * rank + r[None, :]
    tl.store(place, (acc * scale).to(out_ptr.dtype.element_ty), mask=real[:, None] & (r < rank)[None, :])
    if HAS_BIAS:
        tl.store(dots_ptr + slot, dots, mask=real)


@triton.jit(do_not_specialize=["opens", "closes"])
def up_kernel(
    x_ptr, w, bias_ptr, inner_ptr, b_ptr, order_ptr, tile_expert_ptr, tile_row_ptr, starts_ptr, both_ptr, h_ptr,
    opens, closes, tiles, depth, width, top_k, x_row, w_rows, w_expert, w_column, w_inner, rank, b_expert, b_column, b_rank,
    limit, alpha,
    HAS_BIAS: tl.constexpr, RANK: tl.constexpr, ACTIVATION: tl.constexpr, INTERLEAVED: tl.constexpr,
    EVEN: tl.constexpr, FULL: tl.constexpr, BY_COLUMN: tl.constexpr, TMA: tl.constexpr,
    PACKED: tl.constexpr, BLOCK: tl.constexpr, SCALE_BLOCK: tl.constexpr, LANES: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gate and up of gathered tokens [S, 2 width], and what goes down of them [S, width]. Grid (tiles * blocks,).

    `w` holds the experts from `opens` to before `closes`; rows of others are left alone.
    """
    tile, block = _place(tl.program_id(0), tiles, tl.cdiv(width, COLUMNS), GROUP)
    expert = tl.load(tile_expert_ptr + tile)
    if (expert < opens) | (expert >= closes):
        return
    row = tl.load(tile_row_ptr + tile) + tl.arange(0, ROWS)
    end = tl.load(starts_ptr + expert + 1)
    real = row < end
    row = tl.minimum(row, end - 1)
    token = _far(tl.load(order_ptr + row) // top_k, WIDE)
    x_ptrs = x_ptr + token[:, None] * x_row + tl.arange(0, DEPTH)[None, :]
    first = block * COLUMNS
    unit = first + tl.arange(0, COLUMNS)
    c = tl.arange(0, 2 * COLUMNS)
    if INTERLEAVED:
        n, begun = 2 * first + c, 2 * first
        there = n < 2 * width
    else:
        n, begun = first + c % COLUMNS + (c // COLUMNS) * width, first
        there = first + c % COLUMNS < width
    acc = tl.zeros([ROWS, 2 * COLUMNS], tl.float32)
    acc = _product(
        acc, x_ptrs, real, w, expert - opens, n, there, begun, 2 * width, depth, w_rows, w_expert, w_column, w_inner,
        EVEN, FULL, not INTERLEAVED, BY_COLUMN, TMA, PACKED, BLOCK, SCALE_BLOCK, LANES, 2 * COLUMNS, DEPTH, WIDE, PRECISION,
    )  # fmt: skip
    if RANK:
        acc = _adapted(
            acc, inner_ptr, row, b_ptr, expert, n, there, rank, b_expert, b_column, b_rank, RANK, WIDE, PRECISION
        )
    if HAS_BIAS:
        acc += tl.load(bias_ptr + _far(expert, WIDE) * (2 * width) + n, mask=there, other=0.0).to(tl.float32)[None, :]
    both = acc.to(both_ptr.dtype.element_ty)
    tl.store(both_ptr + _far(row, WIDE)[:, None] * (2 * width) + n[None, :], both, mask=real[:, None] & there[None, :])
    if INTERLEAVED:
        gate, up = tl.split(tl.reshape(both.to(tl.float32), [ROWS, COLUMNS, 2]))
    else:
        gate, up = tl.split(tl.permute(tl.reshape(both.to(tl.float32), [ROWS, 2, COLUMNS]), [0, 2, 1]))
    h = _opened(gate, up, limit, alpha, ACTIVATION)
    places = h_ptr + _far(row, WIDE)[:, None] * width + unit[None, :]
    tl.store(places, h.to(h_ptr.dtype.element_ty), mask=real[:, None] & (unit < width)[None, :])


@triton.jit(do_not_specialize=["opens", "closes"])
def product_kernel(
    x_ptr, w, bias_ptr, inner_ptr, b_ptr, order_ptr, tile_expert_ptr, tile_row_ptr, starts_ptr, weights_ptr, out_ptr,
    opens, closes, tiles, depth, columns, top_k, x_row, w_rows, w_expert, w_column, w_inner, rank, b_expert, b_column, b_rank,
    HAS_BIAS: tl.constexpr, WEIGHTED: tl.constexpr, GATHERED: tl.constexpr, BY_SLOT: tl.constexpr, RANK: tl.constexpr,
    EVEN: tl.constexpr, FULL: tl.constexpr, BY_COLUMN: tl.constexpr, TMA: tl.constexpr,
    PACKED: tl.constexpr, BLOCK: tl.constexpr, SCALE_BLOCK: tl.constexpr, LANES: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows, or the tokens they are of, through a projection, stored by row or by slot [S, columns]. Grid (tiles * blocks,).

    `w` holds the experts from `opens` to before `closes`; rows of others are left alone.
    """
    tile, block = _place(tl.program_id(0), tiles, tl.cdiv(columns, COLUMNS), GROUP)
    expert = tl.load(tile_expert_ptr + tile)
    if (expert < opens) | (expert >= closes):
        return
    row = tl.load(tile_row_ptr + tile) + tl.arange(0, ROWS)
    end = tl.load(starts_ptr + expert + 1)
    real = row < end
    row = tl.minimum(row, end - 1)
    slot = tl.load(order_ptr + row)
    source = _far(slot // top_k if GATHERED else row, WIDE)
    x_ptrs = x_ptr + source[:, None] * x_row + tl.arange(0, DEPTH)[None, :]
    first = block * COLUMNS
    n = first + tl.arange(0, COLUMNS)
    there = n < columns
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    acc = _product(
        acc, x_ptrs, real, w, expert - opens, n, there, first, columns, depth, w_rows, w_expert, w_column, w_inner,
        EVEN, FULL, False, BY_COLUMN, TMA, PACKED, BLOCK, SCALE_BLOCK, LANES, COLUMNS, DEPTH, WIDE, PRECISION,
    )  # fmt: skip
    if RANK:
        acc = _adapted(
            acc, inner_ptr, row, b_ptr, expert, n, there, rank, b_expert, b_column, b_rank, RANK, WIDE, PRECISION
        )
    if HAS_BIAS:
        acc += tl.load(bias_ptr + _far(expert, WIDE) * columns + n, mask=there, other=0.0).to(tl.float32)[None, :]
    if WEIGHTED:
        acc *= tl.load(weights_ptr + slot).to(tl.float32)[:, None]
    place = _far(slot if BY_SLOT else row, WIDE)
    places = out_ptr + place[:, None] * columns + n[None, :]
    tl.store(places, acc.to(out_ptr.dtype.element_ty), mask=real[:, None] & there[None, :])


@triton.jit
def gram_kernel(
    left_ptr, right_ptr, order_ptr, starts_ptr, weights_ptr, out_ptr, width_left, width_right, top_k,
    left_row, right_row, out_expert, out_left, out_right,
    LEFT_GATHERED: tl.constexpr, RIGHT_GATHERED: tl.constexpr, WEIGHTED: tl.constexpr,
    FULL_LEFT: tl.constexpr, FULL_RIGHT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, DEPTH: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`left.T @ right` over each expert's rows [E, left, right], zeros where it has none. Grid (E * blocks,)."""
    blocks_right = tl.cdiv(width_right, RIGHT)
    blocks = tl.cdiv(width_left, LEFT) * blocks_right
    expert = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    n = (block // blocks_right) * LEFT + tl.arange(0, LEFT)
    m = (block % blocks_right) * RIGHT + tl.arange(0, RIGHT)
    start, end = tl.load(starts_ptr + expert), tl.load(starts_ptr + expert + 1)
    acc = tl.zeros([LEFT, RIGHT], tl.float32)
    for at in range(start, end, DEPTH):
        row = at + tl.arange(0, DEPTH)
        real = row < end
        row = tl.minimum(row, end - 1)
        slot = tl.load(order_ptr + row)
        left_at = _far(slot // top_k if LEFT_GATHERED else row, WIDE)
        right_at = _far(slot // top_k if RIGHT_GATHERED else row, WIDE)
        left = _columns(left_ptr + left_at[:, None] * left_row + n[None, :], n < width_left, FULL_LEFT)
        places = right_ptr + right_at[:, None] * right_row + m[None, :]
        if FULL_RIGHT:
            right = tl.load(places, mask=real[:, None], other=0.0)
        else:
            right = tl.load(places, mask=real[:, None] & (m < width_right)[None, :], other=0.0)
        if WEIGHTED:
            weight = tl.load(weights_ptr + slot).to(tl.float32)
            right = (right.to(tl.float32) * weight[:, None]).to(right.dtype)
        acc = _dot(tl.trans(left), right, acc, PRECISION)
    places = out_ptr + _far(expert, WIDE) * out_expert + _far(n, WIDE)[:, None] * out_left + m[None, :] * out_right
    inside = (n < width_left)[:, None] & (m < width_right)[None, :]
    tl.store(places, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def combine_kernel(
    rows_ptr, ids_ptr, out_ptr, experts, width, TOP_K: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Each token's sum over its slots, those of no expert left out. Grid (tokens * blocks,)."""
    blocks = tl.cdiv(width, BLOCK)
    token = _far(tl.program_id(0) // blocks, WIDE)
    n = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        slot = token * TOP_K + j
        expert = tl.load(ids_ptr + slot)
        here = tl.where((expert >= 0) & (expert < experts), width, 0)
        acc += tl.load(rows_ptr + slot * width + n, mask=n < here, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * width + n, acc.to(out_ptr.dtype.element_ty), mask=n < width)


@triton.jit
def gate_backward_kernel(
    dh_ptr, both_ptr, order_ptr, starts_ptr, weights_ptr, dots_ptr, d_both_ptr, d_weights_ptr,
    experts, width, limit, alpha,
    HAS_DOTS: tl.constexpr, ACTIVATION: tl.constexpr, INTERLEAVED: tl.constexpr, WITH_H: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """From what came back through down, `dh`, to gradients of gate, up and, by slot, routing weights. Grid (S,).

    What went down is written over `dh`. `dots` are what a bias adds to the routing weights' gradients.
    """
    row = tl.program_id(0)
    if row >= tl.load(starts_ptr + experts):
        return
    slot = tl.load(order_ptr + row)
    weight = tl.load(weights_ptr + slot).to(tl.float32)
    at = _far(row, WIDE) * width
    dtype = d_both_ptr.dtype.element_ty
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        unit = first + tl.arange(0, BLOCK)
        inside = unit < width
        dh = tl.load(dh_ptr + at + unit, mask=inside, other=0.0).to(tl.float32)
        if INTERLEAVED:
            n = 2 * first + tl.arange(0, 2 * BLOCK)
            both = tl.load(both_ptr + 2 * at + n, mask=n < 2 * width, other=0.0).to(tl.float32)
            gate, up = tl.split(tl.reshape(both, [BLOCK, 2]))
        else:
            gate = tl.load(both_ptr + 2 * at + unit, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(both_ptr + 2 * at + width + unit, mask=inside, other=0.0).to(tl.float32)
        h, by_gate, by_up = _slopes(gate, up, limit, alpha, ACTIVATION)
        total += tl.where(inside, h * dh, 0.0)
        if WITH_H:
            tl.store(dh_ptr + at + unit, h.to(dtype), mask=inside)
        grad = dh * weight
        if INTERLEAVED:
            both = tl.reshape(tl.join((grad * by_gate).to(dtype), (grad * by_up).to(dtype)), [2 * BLOCK])
            tl.store(d_both_ptr + 2 * at + n, both, mask=n < 2 * width)
        else:
            tl.store(d_both_ptr + 2 * at + unit, (grad * by_gate).to(dtype), mask=inside)
            tl.store(d_both_ptr + 2 * at + width + unit, (grad * by_up).to(dtype), mask=inside)
    found = tl.sum(total, axis=0)
    if HAS_DOTS:
        found += tl.load(dots_ptr + slot)
    tl.store(d_weights_ptr + slot, found.to(d_weights_ptr.dtype.element_ty))
