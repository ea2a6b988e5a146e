"""Triton kernels: rows of FP8 numbers with their scales, and bytes transposed.

A program rounds one row, which it reads twice where it is longer than a block; the second time the row is in the cache. The
transpose moves tiles through shared memory, so that both sides are read and written along their rows.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _weighed(x_ptr, by_ptr, places, inside, HAS_BY: tl.constexpr):
    x = tl.load(x_ptr + places, mask=inside, other=0.0).to(tl.float32)
    if HAS_BY:
        x = x * tl.load(by_ptr + places, mask=inside, other=0.0)
    return x


@triton.jit
def _bytes_of(x):
    """float8_e4m3fn numbers nearest to x, ties to even, as bytes: by hand, since Triton's interpreter rounds otherwise."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    # below 2^-6 steps are of 2^-9: added to 2^23, they are the last bits
    small = (tl.abs(x) * 512.0 + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
    found = tl.where(size < 0x3C800000, small, tl.where(size > 0x43E00000, 0x7F, normal))
    return (found | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def rounded_rows_kernel(
    x_ptr, by_ptr, numbers_ptr, scale_ptr, stride, width,
    HAS_BY: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows,); `numbers` is contiguous bytes, `by` holds a float32 for each column."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    x = _weighed(x_ptr + row * stride, by_ptr, columns, columns < width, HAS_BY)
    largest = tl.max(tl.abs(x), axis=0)
    for chunk in range(1, CHUNKS):
        places = chunk * BLOCK + columns
        more = _weighed(x_ptr + row * stride, by_ptr, places, places < width, HAS_BY)
        largest = tl.maximum(largest, tl.max(tl.abs(more), axis=0))
    exponent = tl.maximum(((largest.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8, 1)
    tl.store(scale_ptr + row, (exponent << 23).to(tl.float32, bitcast=True))
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    tl.store(numbers_ptr + row * width + columns, _bytes_of(x * inverse), mask=columns < width)
    for chunk in range(1, CHUNKS):
        places = chunk * BLOCK + columns
        more = _weighed(x_ptr + row * stride, by_ptr, places, places < width, HAS_BY)
        tl.store(numbers_ptr + row * width + places, _bytes_of(more * inverse), mask=places < width)


@triton.jit
def transpose_kernel(in_ptr, out_ptr, rows, columns, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Grid (blocks of rows, blocks of columns); `in` [rows, columns] and `out` [columns, rows] are contiguous bytes."""
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(1).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (r[:, None] < rows) & (c[None, :] < columns)
    tile = tl.load(in_ptr + r[:, None] * columns + c[None, :], mask=inside, other=0)
    tl.store(out_ptr + c[:, None] * rows + r[None, :], tl.trans(tile), mask=tl.trans(inside))
