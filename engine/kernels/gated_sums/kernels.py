"""Triton kernels: a gated activation of two sums, each of a wide result and a low-rank product, and the gradients.

A program owns some rows and takes `steps` steps of PIECES tiles of columns, the next of which are on their way while one is computed.
A tile of a wide result is where the low-rank product is added up, so it is read once, in the form in which products come, and the sums
are never written; what is written is multiplied with the same thin matrices at once, which would each read it anew. Those
products are sums over columns: each program writes its share, and `gated_sums_end_kernel` adds the shares. The tiles of programs that
run beside each other lie beside each other, so that memory is read in long runs. Every element is read before any is written at
its place, so gradients may go where inputs were. Names: `inner` [rows, RANK], `outer` [columns, RANK] with strides of both,
RANKS the rank rounded up to what a product of tiles takes, `shares` [programs of a row, rows, sum of RANK]. RANK 0 stands for no
product: what it adds is nought.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.gated.kernels import _share, _slope


@triton.jit
def _inner(
    inner_ptr, stride, first, rows, ROWS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, WIDE: tl.constexpr
):
    """A low-rank product's first factor for the rows from `first` on. The interpreter multiplies 16-bit numbers as
    float32 alone (WIDE)."""
    r, k = tl.arange(0, ROWS), tl.arange(0, RANKS)
    inside = (r < rows - first)[:, None] & (k < RANK)[None, :]
    inner = tl.load(inner_ptr + first * stride + r[:, None] * stride + k[None, :], mask=inside, other=0.0)
    if WIDE:
        inner = inner.to(tl.float32)
    return inner


@triton.jit
def _outer(
    outer_ptr, column_stride, rank_stride, c, columns,
    RANK: tl.constexpr, RANKS: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Its second one for these columns: [columns, RANKS]."""
    k = tl.arange(0, RANKS)
    place = outer_ptr + c[:, None] * column_stride + k[None, :] * rank_stride
    if EVEN and RANK == RANKS:
        outer = tl.load(place)
    else:
        outer = tl.load(place, mask=(c < columns)[:, None] & (k < RANK)[None, :], other=0.0)
    if WIDE:
        outer = outer.to(tl.float32)
    return outer


@triton.jit
def _sum(
    wide_ptr, place, inside, inner, outer_ptr, column_stride, rank_stride, c, columns,
    RANK: tl.constexpr, RANKS: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A tile of `wide + inner @ outer.T` in float32, and `outer` of its columns."""
    x = tl.load(wide_ptr + place, mask=inside, other=0.0).to(tl.float32)
    outer = _outer(outer_ptr, column_stride, rank_stride, c, columns, RANK, RANKS, EVEN, WIDE)
    if RANK > 0:
        x = tl.dot(inner, tl.trans(outer), x, input_precision="ieee")
    return x, outer


@triton.jit
def _write(ptr, place, inside, x, acc, outer, RANK: tl.constexpr, WIDE: tl.constexpr):
    """Writes a tile; `acc + tile @ outer` of it as it is written."""
    tile = x.to(ptr.dtype.element_ty)
    tl.store(ptr + place, tile, mask=inside)
    if RANK > 0:
        if WIDE:
            tile = tile.to(tl.float32)
        acc = tl.dot(tile, outer, acc, input_precision="ieee")
    return acc


@triton.jit
def _keep(
    shares_ptr, acc, part, first, rows,
    ROWS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, AT: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Writes a program's share of what leads into a factor, whose columns begin at AT of ALL."""
    r, k = tl.arange(0, ROWS), tl.arange(0, RANKS)
    inside = (r < rows - first)[:, None] & (k < RANK)[None, :]
    tl.store(shares_ptr + (part * rows + first + r[:, None]) * ALL + AT + k[None, :], acc, mask=inside)


@triton.jit(do_not_specialize=["rows", "steps"])
def gated_sums_fwd_kernel(
    gate_ptr, gate_inner_ptr, gate_outer_ptr, up_ptr, up_inner_ptr, up_outer_ptr, down_ptr, out_ptr, shares_ptr,
    gate_inner_stride, gate_column_stride, gate_rank_stride, up_inner_stride, up_column_stride, up_rank_stride,
    down_column_stride, down_rank_stride, rows, columns, steps, ACTIVATION: tl.constexpr,
    GATE_RANK: tl.constexpr, GATE_RANKS: tl.constexpr, UP_RANK: tl.constexpr, UP_RANKS: tl.constexpr,
    DOWN_RANK: tl.constexpr, DOWN_RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PIECES: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Grid (programs of a row, first, by tiles of ROWS rows); `gate`, `up` and `out` are contiguous. EVEN: programs fill `columns`."""
    parts = tl.cdiv(columns, steps * PIECES * COLUMNS)
    part = tl.program_id(0) % parts
    first = (tl.program_id(0) // parts).to(tl.int64) * ROWS
    gate_inner = _inner(gate_inner_ptr, gate_inner_stride, first, rows, ROWS, GATE_RANK, GATE_RANKS, WIDE)
    up_inner = _inner(up_inner_ptr, up_inner_stride, first, rows, ROWS, UP_RANK, UP_RANKS, WIDE)
    of_down = tl.zeros((ROWS, DOWN_RANKS), tl.float32)
    r, begin = tl.arange(0, ROWS), first * columns
    for step in tl.range(steps, num_stages=STAGES):
        for piece in tl.static_range(PIECES):
            c = ((step * parts + part) * PIECES + piece) * COLUMNS + tl.arange(0, COLUMNS)
            place, inside = r[:, None] * columns + c[None, :], (r < rows - first)[:, None]
            if not EVEN:
                inside = inside & (c < columns)[None, :]
            gate, _ = _sum(
                gate_ptr + begin, place, inside, gate_inner, gate_outer_ptr, gate_column_stride, gate_rank_stride, c, columns,
                GATE_RANK, GATE_RANKS, EVEN, WIDE,
            )  # fmt: skip
            up, _ = _sum(
                up_ptr + begin, place, inside, up_inner, up_outer_ptr, up_column_stride, up_rank_stride, c, columns,
                UP_RANK, UP_RANKS, EVEN, WIDE,
            )  # fmt: skip
            down = _outer(down_ptr, down_column_stride, down_rank_stride, c, columns, DOWN_RANK, DOWN_RANKS, EVEN, WIDE)
            product = gate * _share(gate, ACTIVATION) * up
            of_down = _write(out_ptr + begin, place, inside, product, of_down, down, DOWN_RANK, WIDE)
    if DOWN_RANK > 0:
        _keep(shares_ptr, of_down, part, first, rows, ROWS, DOWN_RANK, DOWN_RANKS, 0, DOWN_RANK)


@triton.jit(do_not_specialize=["rows", "steps"])
def gated_sums_bwd_kernel(
    grad_ptr, grad_inner_ptr, grad_outer_ptr, gate_ptr, gate_inner_ptr, gate_outer_ptr,
    up_ptr, up_inner_ptr, up_outer_ptr, dgate_ptr, dup_ptr, product_ptr, shares_ptr,
    grad_inner_stride, grad_column_stride, grad_rank_stride, gate_inner_stride, gate_column_stride, gate_rank_stride,
    up_inner_stride, up_column_stride, up_rank_stride, rows, columns, steps, ACTIVATION: tl.constexpr,
    GRAD_RANK: tl.constexpr, GRAD_RANKS: tl.constexpr, GATE_RANK: tl.constexpr, GATE_RANKS: tl.constexpr,
    UP_RANK: tl.constexpr, UP_RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PIECES: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """As forward; `dgate`, `dup`, `product` may be `gate`, `up`, `grad`. The product is written where the gradient is a sum."""
    parts = tl.cdiv(columns, steps * PIECES * COLUMNS)
    part = tl.program_id(0) % parts
    first = (tl.program_id(0) // parts).to(tl.int64) * ROWS
    grad_inner = _inner(grad_inner_ptr, grad_inner_stride, first, rows, ROWS, GRAD_RANK, GRAD_RANKS, WIDE)
    gate_inner = _inner(gate_inner_ptr, gate_inner_stride, first, rows, ROWS, GATE_RANK, GATE_RANKS, WIDE)
    up_inner = _inner(up_inner_ptr, up_inner_stride, first, rows, ROWS, UP_RANK, UP_RANKS, WIDE)
    of_product = tl.zeros((ROWS, GRAD_RANKS), tl.float32)
    of_gate, of_up = tl.zeros((ROWS, GATE_RANKS), tl.float32), tl.zeros((ROWS, UP_RANKS), tl.float32)
    r, begin = tl.arange(0, ROWS), first * columns
    for step in tl.range(steps, num_stages=STAGES):
        for piece in tl.static_range(PIECES):
            c = ((step * parts + part) * PIECES + piece) * COLUMNS + tl.arange(0, COLUMNS)
            place, inside = r[:, None] * columns + c[None, :], (r < rows - first)[:, None]
            if not EVEN:
                inside = inside & (c < columns)[None, :]
            grad, grad_outer = _sum(
                grad_ptr + begin, place, inside, grad_inner, grad_outer_ptr, grad_column_stride, grad_rank_stride, c, columns,
                GRAD_RANK, GRAD_RANKS, EVEN, WIDE,
            )  # fmt: skip
            gate, gate_outer = _sum(
                gate_ptr + begin, place, inside, gate_inner, gate_outer_ptr, gate_column_stride, gate_rank_stride, c, columns,
                GATE_RANK, GATE_RANKS, EVEN, WIDE,
            )  # fmt: skip
            up, up_outer = _sum(
                up_ptr + begin, place, inside, up_inner, up_outer_ptr, up_column_stride, up_rank_stride, c, columns,
                UP_RANK, UP_RANKS, EVEN, WIDE,
            )  # fmt: skip
            share = _share(gate, ACTIVATION)
            act = gate * share
            slope = grad * up * _slope(gate, share, ACTIVATION)
            of_gate = _write(dgate_ptr + begin, place, inside, slope, of_gate, gate_outer, GATE_RANK, WIDE)
            of_up = _write(dup_ptr + begin, place, inside, grad * act, of_up, up_outer, UP_RANK, WIDE)
            if GRAD_RANK > 0:
                of_product = _write(
                    product_ptr + begin, place, inside, act * up, of_product, grad_outer, GRAD_RANK, WIDE
                )
    every: tl.constexpr = GATE_RANK + UP_RANK + GRAD_RANK
    _keep(shares_ptr, of_gate, part, first, rows, ROWS, GATE_RANK, GATE_RANKS, 0, every)
    _keep(shares_ptr, of_up, part, first, rows, ROWS, UP_RANK, UP_RANKS, GATE_RANK, every)
    _keep(shares_ptr, of_product, part, first, rows, ROWS, GRAD_RANK, GRAD_RANKS, GATE_RANK + UP_RANK, every)


@triton.jit
def gated_sums_end_kernel(shares_ptr, out_ptr, count, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Adds the shares [PARTS, count] in their order, so that the sum is the same each time."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for _part in range(PARTS):
        total += tl.load(shares_ptr + place, mask=place < count, other=0.0)
        shares_ptr += count
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=place < count)
