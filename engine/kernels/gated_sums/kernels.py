"""Triton kernels: a gated activation of two sums, each of a wide result and a low-rank product, and the gradients.

A program owns a tile of rows and columns. The low-rank products are formed where they are added, so that the wide results are
read once and the sums never written. Every element is read before any is written at its place, so gradients may go where inputs
were. Names: `inner` [rows, RANK], `outer` [columns, RANK] with strides of both; RANKS is RANK rounded up to what a product of
tiles takes, and RANK 0 stands for no product.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.gated.kernels import _share, _slope


@triton.jit
def _total(
    wide_ptr, inner_ptr, outer_ptr, inner_stride, column_stride, rank_stride, r, c, rows, columns,
    RANK: tl.constexpr, RANKS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A tile of the sum in float32. The interpreter multiplies 16-bit numbers as float32 alone (WIDE)."""
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    x = tl.load(wide_ptr + r[:, None] * columns + c[None, :], mask=inside, other=0.0).to(tl.float32)
    if RANK > 0:
        k = tl.arange(0, RANKS)
        inner = tl.load(
            inner_ptr + r[:, None] * inner_stride + k[None, :],
            mask=(r < rows)[:, None] & (k < RANK)[None, :],
            other=0.0,
        )
        outer = tl.load(
            outer_ptr + c[None, :] * column_stride + k[:, None] * rank_stride,
            mask=(c < columns)[None, :] & (k < RANK)[:, None], other=0.0,
        )  # fmt: skip
        if WIDE:
            inner, outer = inner.to(tl.float32), outer.to(tl.float32)
        x += tl.dot(inner, outer, input_precision="ieee")
    return x


@triton.jit
def gated_sums_fwd_kernel(
    gate_ptr, gate_inner_ptr, gate_outer_ptr, up_ptr, up_inner_ptr, up_outer_ptr, out_ptr,
    gate_inner_stride, gate_column_stride, gate_rank_stride, up_inner_stride, up_column_stride, up_rank_stride,
    rows, columns, ACTIVATION: tl.constexpr, GATE_RANK: tl.constexpr, GATE_RANKS: tl.constexpr,
    UP_RANK: tl.constexpr, UP_RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles,), columns first; `gate`, `up` and `out` are contiguous."""
    blocks = tl.cdiv(columns, COLUMNS)
    r = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = (tl.program_id(0) % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    gate = _total(
        gate_ptr, gate_inner_ptr, gate_outer_ptr, gate_inner_stride, gate_column_stride, gate_rank_stride,
        r, c, rows, columns, GATE_RANK, GATE_RANKS, WIDE,
    )  # fmt: skip
    up = _total(
        up_ptr, up_inner_ptr, up_outer_ptr, up_inner_stride, up_column_stride, up_rank_stride,
        r, c, rows, columns, UP_RANK, UP_RANKS, WIDE,
    )  # fmt: skip
    product = gate * _share(gate, ACTIVATION) * up
    place = out_ptr + r[:, None] * columns + c[None, :]
    tl.store(place, product.to(out_ptr.dtype.element_ty), mask=(r < rows)[:, None] & (c < columns)[None, :])


@triton.jit
def gated_sums_bwd_kernel(
    grad_ptr, grad_inner_ptr, grad_outer_ptr, gate_ptr, gate_inner_ptr, gate_outer_ptr,
    up_ptr, up_inner_ptr, up_outer_ptr, dgate_ptr, dup_ptr, product_ptr,
    grad_inner_stride, grad_column_stride, grad_rank_stride, gate_inner_stride, gate_column_stride, gate_rank_stride,
    up_inner_stride, up_column_stride, up_rank_stride,
    rows, columns, ACTIVATION: tl.constexpr, WITH_PRODUCT: tl.constexpr,
    GRAD_RANK: tl.constexpr, GRAD_RANKS: tl.constexpr, GATE_RANK: tl.constexpr, GATE_RANKS: tl.constexpr,
    UP_RANK: tl.constexpr, UP_RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """As forward; `dgate`, `dup` and `product` may be `gate`, `up` and `grad` themselves."""
    blocks = tl.cdiv(columns, COLUMNS)
    r = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = (tl.program_id(0) % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    grad = _total(
        grad_ptr, grad_inner_ptr, grad_outer_ptr, grad_inner_stride, grad_column_stride, grad_rank_stride,
        r, c, rows, columns, GRAD_RANK, GRAD_RANKS, WIDE,
    )  # fmt: skip
    gate = _total(
        gate_ptr, gate_inner_ptr, gate_outer_ptr, gate_inner_stride, gate_column_stride, gate_rank_stride,
        r, c, rows, columns, GATE_RANK, GATE_RANKS, WIDE,
    )  # fmt: skip
    up = _total(
        up_ptr, up_inner_ptr, up_outer_ptr, up_inner_stride, up_column_stride, up_rank_stride,
        r, c, rows, columns, UP_RANK, UP_RANKS, WIDE,
    )  # fmt: skip
    share = _share(gate, ACTIVATION)
    act = gate * share
    dgate = grad * up * _slope(gate, share, ACTIVATION)
    place, inside = r[:, None] * columns + c[None, :], (r < rows)[:, None] & (c < columns)[None, :]
    tl.store(dgate_ptr + place, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
    tl.store(dup_ptr + place, (grad * act).to(dup_ptr.dtype.element_ty), mask=inside)
    if WITH_PRODUCT:
        tl.store(product_ptr + place, (act * up).to(product_ptr.dtype.element_ty), mask=inside)
