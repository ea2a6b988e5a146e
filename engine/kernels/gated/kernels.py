"""Triton kernels: a gated activation forward, and its two gradients with the product itself in one pass.

A program owns a run of columns of one row. Rows may lie apart, so the halves of one fused projection are read where they
are. Every element is read before any is written at its place, so results may go where inputs were.
Names: R rows, `width` the columns of one.
"""

from __future__ import annotations

import triton
import triton.language as tl

SILU, GELU_TANH, GELU = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_LOG2_E = tl.constexpr(1.4426950408889634)
_TANH_1 = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
_TANH_3 = tl.constexpr(0.07135481282640187)  # 0.044715 times that
_ROOT_HALF = tl.constexpr(0.7071067811865476)
_DENSITY = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2 pi)


@triton.jit
def _sigmoid(x):
    """`tl.sigmoid` in fewer instructions: the card has powers of two."""
    return 1.0 / (1.0 + tl.exp2(x * -_LOG2_E))


@triton.jit
def _share(x, ACTIVATION: tl.constexpr):
    """What the activation lets through of x: act(x) = x * share(x)."""
    if ACTIVATION == SILU:
        share = _sigmoid(x)
    elif ACTIVATION == GELU_TANH:
        share = _sigmoid(x * (_TANH_1 + _TANH_3 * x * x))  # (1 + tanh(z)) / 2 is sigmoid(2 z)
    else:
        share = 0.5 * (1.0 + tl.erf(x * _ROOT_HALF))
    return share


@triton.jit
def _slope(x, share, ACTIVATION: tl.constexpr):
    """The activation's derivative at x."""
    if ACTIVATION == SILU:
        slope = share * (1.0 + x * (1.0 - share))
    elif ACTIVATION == GELU_TANH:
        slope = share * (1.0 + (1.0 - share) * x * (_TANH_1 + 3.0 * _TANH_3 * x * x))
    else:
        slope = share + x * _DENSITY * tl.exp(-0.5 * x * x)
    return slope


@triton.jit
def gated_fwd_kernel(
    gate_ptr, up_ptr, out_ptr, gate_stride, up_stride, width,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (R * blocks of columns,); `out` is contiguous."""
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    product = gate * _share(gate, ACTIVATION) * up
    tl.store(out_ptr + row * width + columns, product.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gated_bwd_kernel(
    grad_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, product_ptr,
    grad_stride, gate_stride, up_stride, dgate_stride, dup_stride, product_stride, width,
    ACTIVATION: tl.constexpr, WITH_PRODUCT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As forward; `dgate`, `dup` and `product` may be `gate`, `up` and `grad` themselves."""
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    grad = tl.load(grad_ptr + row * grad_stride + columns, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    share = _share(gate, ACTIVATION)
    act = gate * share
    dgate = grad * up * _slope(gate, share, ACTIVATION)
    tl.store(dgate_ptr + row * dgate_stride + columns, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
    tl.store(dup_ptr + row * dup_stride + columns, (grad * act).to(dup_ptr.dtype.element_ty), mask=inside)
    if WITH_PRODUCT:
        tl.store(product_ptr + row * product_stride + columns, (act * up).to(product_ptr.dtype.element_ty), mask=inside)
