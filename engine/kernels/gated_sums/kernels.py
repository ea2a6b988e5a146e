"""Triton kernels: a gated activation of two sums, each of a wide result and a low-rank product, and the gradients.

A program owns some rows and SPAN tiles of columns, one after the other. The low-rank products are formed tile by tile where they
are added, so that the wide results are read once and the sums never written; what is written is multiplied with the same thin
matrices at once, which would each read it anew. Those products are sums over columns: each program writes its share, and
`gated_sums_end_kernel` adds the shares. Every element is read before any is written at its place, so gradients may go where
inputs were. Names: `inner` [rows, RANK], `outer` [columns, RANK] with strides of both, `shares` [programs of a row, rows, RANKS].
RANK 0 stands for no product: what it adds is nought.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.gated.kernels import _share, _slope


@triton.jit
def _inner(inner_ptr, stride, r, rows, RANK: tl.constexpr, RANKS: tl.constexpr, WIDE: tl.constexpr):
    """A low-rank product's first factor for these rows; RANKS is RANK rounded up to what a product of tiles takes.
    The interpreter multiplies 16-bit numbers as float32 alone (WIDE)."""
    k = tl.arange(0, RANKS)
    inside = (r < rows)[:, None] & (k < RANK)[None, :]
    inner = tl.load(inner_ptr + r[:, None] * stride + k[None, :], mask=inside, other=0.0)
    if WIDE:
        inner = inner.to(tl.float32)
    return inner


@triton.jit
def _outer(
    outer_ptr, column_stride, rank_stride, c, columns, RANK: tl.constexpr, RANKS: tl.constexpr, WIDE: tl.constexpr
):
    """Its second one for these columns, turned: [RANKS, columns]."""
    k = tl.arange(0, RANKS)
    inside = (c < columns)[None, :] & (k < RANK)[:, None]
    outer = tl.load(outer_ptr + c[None, :] * column_stride + k[:, None] * rank_stride, mask=inside, other=0.0)
    if WIDE:
        outer = outer.to(tl.float32)
    return outer


@triton.jit
def _added(
    x, inner, outer_ptr, column_stride, rank_stride, c, columns,
    RANK: tl.constexpr, RANKS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The sum's tile, and the product's second factor for it."""
    outer = _outer(outer_ptr, column_stride, rank_stride, c, columns, RANK, RANKS, WIDE)
    return x + tl.dot(inner, outer, input_precision="ieee"), outer


@triton.jit
def _wide(ptr, r, c, rows, columns):
    """A tile of a contiguous wide result in float32."""
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    return tl.load(ptr + r[:, None] * columns + c[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _led_inwards(acc, tile, outer, WIDE: tl.constexpr):
    """`acc + tile @ outer`, of a tile as it is written."""
    if WIDE:
        tile = tile.to(tl.float32)
    return tl.dot(tile, tl.trans(outer), acc, input_precision="ieee")


@triton.jit
def _write(ptr, place, inside, x, acc, outer, WIDE: tl.constexpr):
    """Writes a tile; `acc + tile @ outer` of it as it was written."""
    tile = x.to(ptr.dtype.element_ty)
    tl.store(ptr + place, tile, mask=inside)
    return _led_inwards(acc, tile, outer, WIDE)


@triton.jit
def _keep(shares_ptr, acc, part, r, rows, RANK: tl.constexpr, RANKS: tl.constexpr, AT: tl.constexpr, ALL: tl.constexpr):
    """Writes a program's share of what leads into a factor, whose columns begin at AT of ALL."""
    k = tl.arange(0, RANKS)
    inside = (r < rows)[:, None] & (k < RANK)[None, :]
    tl.store(shares_ptr + (part * rows + r[:, None]) * ALL + AT + k[None, :], acc, mask=inside)


@triton.jit
def gated_sums_fwd_kernel(
    gate_ptr, gate_inner_ptr, gate_outer_ptr, up_ptr, up_inner_ptr, up_outer_ptr, down_ptr, out_ptr, shares_ptr,
    gate_inner_stride, gate_column_stride, gate_rank_stride, up_inner_stride, up_column_stride, up_rank_stride,
    down_column_stride, down_rank_stride, rows, columns, ACTIVATION: tl.constexpr,
    GATE_RANK: tl.constexpr, GATE_RANKS: tl.constexpr, UP_RANK: tl.constexpr, UP_RANKS: tl.constexpr,
    DOWN_RANK: tl.constexpr, DOWN_RANKS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPAN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of SPAN * COLUMNS columns, first, by ROWS rows); `gate`, `up` and `out` are contiguous."""
    parts = tl.cdiv(columns, SPAN * COLUMNS)
    part = tl.program_id(0) % parts
    r = (tl.program_id(0) // parts).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    if GATE_RANK > 0:
        gate_inner = _inner(gate_inner_ptr, gate_inner_stride, r, rows, GATE_RANK, GATE_RANKS, WIDE)
    if UP_RANK > 0:
        up_inner = _inner(up_inner_ptr, up_inner_stride, r, rows, UP_RANK, UP_RANKS, WIDE)
    if DOWN_RANK > 0:
        acc = tl.zeros((ROWS, DOWN_RANKS), tl.float32)
    for step in range(SPAN):
        c = (part * SPAN + step) * COLUMNS + tl.arange(0, COLUMNS)
        gate, up = _wide(gate_ptr, r, c, rows, columns), _wide(up_ptr, r, c, rows, columns)
        if GATE_RANK > 0:
            outer = _outer(
                gate_outer_ptr, gate_column_stride, gate_rank_stride, c, columns, GATE_RANK, GATE_RANKS, WIDE
            )
            gate += tl.dot(gate_inner, outer, input_precision="ieee")
        if UP_RANK > 0:
            outer = _outer(up_outer_ptr, up_column_stride, up_rank_stride, c, columns, UP_RANK, UP_RANKS, WIDE)
            up += tl.dot(up_inner, outer, input_precision="ieee")
        product = (gate * _share(gate, ACTIVATION) * up).to(out_ptr.dtype.element_ty)
        place, inside = r[:, None] * columns + c[None, :], (r < rows)[:, None] & (c < columns)[None, :]
        tl.store(out_ptr + place, product, mask=inside)
        if DOWN_RANK > 0:
            outer = _outer(down_ptr, down_column_stride, down_rank_stride, c, columns, DOWN_RANK, DOWN_RANKS, WIDE)
            acc = _led_inwards(acc, product, outer, WIDE)
    if DOWN_RANK > 0:
        _keep(shares_ptr, acc, part, r, rows, DOWN_RANK, DOWN_RANKS, 0, DOWN_RANK)


@triton.jit
def gated_sums_bwd_kernel(
    grad_ptr, grad_inner_ptr, grad_outer_ptr, gate_ptr, gate_inner_ptr, gate_outer_ptr,
    up_ptr, up_inner_ptr, up_outer_ptr, dgate_ptr, dup_ptr, product_ptr, shares_ptr,
    grad_inner_stride, grad_column_stride, grad_rank_stride, gate_inner_stride, gate_column_stride, gate_rank_stride,
    up_inner_stride, up_column_stride, up_rank_stride, rows, columns, ACTIVATION: tl.constexpr,
    GRAD_RANK: tl.constexpr, GRAD_RANKS: tl.constexpr, GATE_RANK: tl.constexpr, GATE_RANKS: tl.constexpr,
    UP_RANK: tl.constexpr, UP_RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPAN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """As forward; `dgate`, `dup`, `product` may be `gate`, `up`, `grad`. The product is written where the gradient is a sum."""
    parts = tl.cdiv(columns, SPAN * COLUMNS)
    part = tl.program_id(0) % parts
    r = (tl.program_id(0) // parts).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    grad_inner = _inner(grad_inner_ptr, grad_inner_stride, r, rows, GRAD_RANK, GRAD_RANKS, WIDE)
    gate_inner = _inner(gate_inner_ptr, gate_inner_stride, r, rows, GATE_RANK, GATE_RANKS, WIDE)
    up_inner = _inner(up_inner_ptr, up_inner_stride, r, rows, UP_RANK, UP_RANKS, WIDE)
    of_product = tl.zeros((ROWS, GRAD_RANKS), tl.float32)
    of_gate, of_up = tl.zeros((ROWS, GATE_RANKS), tl.float32), tl.zeros((ROWS, UP_RANKS), tl.float32)
    for step in range(SPAN):
        c = (part * SPAN + step) * COLUMNS + tl.arange(0, COLUMNS)
        grad, gate = _wide(grad_ptr, r, c, rows, columns), _wide(gate_ptr, r, c, rows, columns)
        up = _wide(up_ptr, r, c, rows, columns)
        grad, grad_outer = _added(
            grad,
            grad_inner,
            grad_outer_ptr,
            grad_column_stride,
            grad_rank_stride,
            c,
            columns,
            GRAD_RANK,
            GRAD_RANKS,
            WIDE,
        )
        gate, gate_outer = _added(
            gate,
            gate_inner,
            gate_outer_ptr,
            gate_column_stride,
            gate_rank_stride,
            c,
            columns,
            GATE_RANK,
            GATE_RANKS,
            WIDE,
        )
        up, up_outer = _added(
            up, up_inner, up_outer_ptr, up_column_stride, up_rank_stride, c, columns, UP_RANK, UP_RANKS, WIDE
        )
        share = _share(gate, ACTIVATION)
        act = gate * share
        place, inside = r[:, None] * columns + c[None, :], (r < rows)[:, None] & (c < columns)[None, :]
        slope = grad * up * _slope(gate, share, ACTIVATION)
        of_gate = _write(dgate_ptr, place, inside, slope, of_gate, gate_outer, WIDE)
        of_up = _write(dup_ptr, place, inside, grad * act, of_up, up_outer, WIDE)
        if GRAD_RANK > 0:
            of_product = _write(product_ptr, place, inside, act * up, of_product, grad_outer, WIDE)
    every: tl.constexpr = GATE_RANK + UP_RANK + GRAD_RANK
    _keep(shares_ptr, of_gate, part, r, rows, GATE_RANK, GATE_RANKS, 0, every)
    _keep(shares_ptr, of_up, part, r, rows, UP_RANK, UP_RANKS, GATE_RANK, every)
    _keep(shares_ptr, of_product, part, r, rows, GRAD_RANK, GRAD_RANKS, GATE_RANK + UP_RANK, every)


@triton.jit
def gated_sums_end_kernel(shares_ptr, out_ptr, count, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Adds the shares [PARTS, count] in their order, so that the sum is the same each time."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for _part in range(PARTS):
        total += tl.load(shares_ptr + place, mask=place < count, other=0.0)
        shares_ptr += count
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=place < count)
