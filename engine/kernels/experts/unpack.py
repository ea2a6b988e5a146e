"""Routed experts unpacked in one launch, bit for bit as bitsandbytes, or plain torch, unpacks each of them."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

TILE, TILES = 1024, 8
"""Bytes of packed numbers that one program reads at a time, and how often it does."""
INT8 = tl.constexpr(7.874015718698502e-3)
"""1 / 127, as bitsandbytes writes it."""


@triton.jit(do_not_specialize=["first"])
def unpack_kernel(
    starts, numbers, scales, middle, steps, code, scale_code, out,
    first, bytes_each, scales_each, steps_each, weights_each, columns,
    BLOCK: tl.constexpr, SCALE_BLOCK: tl.constexpr, FOUR: tl.constexpr, ROUTED: tl.constexpr, TILE: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Some tiles of an expert: `out[place]` is what `numbers[first + place]` stands for, where that has rows."""
    place = tl.program_id(1).to(tl.int64)
    expert = first + place
    if ROUTED:  # noqa: SIM102  # the first is known when it is compiled
        if tl.load(starts + expert) == tl.load(starts + expert + 1):
            return
    for tile in range(tl.program_id(0) * TILES, tl.program_id(0) * TILES + TILES):
        _unpack_tile(
            tile, place, expert, numbers, scales, middle, steps, code, scale_code, out,
            bytes_each, scales_each, steps_each, weights_each, columns, BLOCK, SCALE_BLOCK, FOUR, TILE,
        )  # fmt: skip


@triton.jit
def _unpack_tile(
    tile, place, expert, numbers, scales, middle, steps, code, scale_code, out,
    bytes_each, scales_each, steps_each, weights_each, columns,
    BLOCK: tl.constexpr, SCALE_BLOCK: tl.constexpr, FOUR: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    at = tile * TILE + tl.arange(0, TILE)
    there = at < bytes_each
    held = tl.load(numbers + expert * bytes_each + at, mask=there, other=0)
    to = out + place * weights_each
    if FOUR:
        block = at * 2 // BLOCK
        coded = tl.load(scales + expert * scales_each + block, mask=there, other=0).to(tl.int32)
        step = tl.load(steps + expert * steps_each + block // SCALE_BLOCK, mask=there, other=0.0)
        scale = tl.load(scale_code + coded) * step + tl.load(middle + expert)
        held = held.to(tl.int32)
        first = (tl.load(code + (held >> 4)) * scale).to(out.dtype.element_ty)
        second = (tl.load(code + (held & 15)) * scale).to(out.dtype.element_ty)
        both = tile * (2 * TILE) + tl.arange(0, 2 * TILE)
        tl.store(to + both, tl.interleave(first, second), mask=both < weights_each)
    else:
        row = tl.load(scales + expert * scales_each + at // columns, mask=there, other=0.0)
        tl.store(to + at, (held.to(tl.float32) * row * INT8).to(out.dtype.element_ty), mask=there)


@triton.jit
def _e2m1(code):
    """What four bits stand for, in float32: from 1 on its bits are those of a float32 moved to their place."""
    size = code & 7
    value = tl.where(size < 2, size.to(tl.float32) * 0.5, ((size + 252) << 22).to(tl.float32, bitcast=True))
    return tl.where(code < 8, value, -value)


@triton.jit
def _power(scale):
    """2^(scale - 127) in float32, of which the smallest has no bit of an exponent; 255 is not a number."""
    bits = tl.where(scale == 0, 1 << 22, tl.where(scale == 255, 0x7FC00000, scale << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _e4m3(code):
    """What eight bits stand for, in float32: from 8 on their bits are those of a float32 moved to their place."""
    size = code & 127
    bits = tl.where(size == 127, 0x7FC00000, (size << 20) + (120 << 23))
    value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, bits.to(tl.float32, bitcast=True))
    return tl.where(code < 128, value, -value)


@triton.jit(do_not_specialize=["first"])
def unpack_blocks_kernel(
    starts, numbers, scales, middle, out, first, bytes_each, scales_each, weights_each, columns, row_bytes,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr, PADDED: tl.constexpr, ROUTED: tl.constexpr, TILE: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """As `unpack_kernel` for MXFP4, and with WHOLE, where an expert has a scale too, NVFP4; PADDED where rows end in a block
    that is not full."""
    place = tl.program_id(1).to(tl.int64)
    expert = first + place
    if ROUTED:  # noqa: SIM102  # the first is known when it is compiled
        if tl.load(starts + expert) == tl.load(starts + expert + 1):
            return
    for tile in range(tl.program_id(0) * TILES, tl.program_id(0) * TILES + TILES):
        at = tile * TILE + tl.arange(0, TILE)
        there = at < bytes_each
        held = tl.load(numbers + expert * bytes_each + at, mask=there, other=0).to(tl.int32)
        coded = tl.load(scales + expert * scales_each + at * 2 // BLOCK, mask=there, other=0).to(tl.int32)
        scale = _e4m3(coded) * tl.load(middle + expert) if WHOLE else _power(coded)
        low = (_e2m1(held & 15) * scale).to(out.dtype.element_ty)
        high = (_e2m1(held >> 4) * scale).to(out.dtype.element_ty)
        both = tile * (2 * TILE) + tl.arange(0, 2 * TILE)
        if PADDED:
            column = both % (2 * row_bytes)
            kept = (both < 2 * bytes_each) & (column < columns)
            both = both // (2 * row_bytes) * columns + column
        else:
            kept = both < weights_each
        tl.store(out + place * weights_each + both, tl.interleave(low, high), mask=kept)


@triton.jit(do_not_specialize=["first"])
def unpack_fp8_kernel(
    starts, numbers, scales, out, first, scales_each, weights_each, columns, across, rows_of_block, columns_of_block,
    ROUTED: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """As `unpack_kernel` for FP8, with a scale for each block; `across` of them lie side by side."""
    place = tl.program_id(1).to(tl.int64)
    expert = first + place
    if ROUTED:  # noqa: SIM102  # the first is known when it is compiled
        if tl.load(starts + expert) == tl.load(starts + expert + 1):
            return
    for tile in range(tl.program_id(0) * TILES, tl.program_id(0) * TILES + TILES):
        at = tile * TILE + tl.arange(0, TILE)
        there = at < weights_each
        held = tl.load(numbers + expert * weights_each + at, mask=there, other=0).to(tl.int32)
        row = at // columns
        block = row // rows_of_block * across + (at - row * columns) // columns_of_block
        scale = tl.load(scales + expert * scales_each + block, mask=there, other=0.0)
        tl.store(out + place * weights_each + at, (_e4m3(held) * scale).to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["first"])
def unpack_groups_kernel(
    starts, numbers, scales, zeros, of_column, out, first, bytes_each, scales_each, weights_each, columns, row_bytes, count,
    group, FOUR: tl.constexpr, ZEROS: tl.constexpr, ORDERED: tl.constexpr, ROUTED: tl.constexpr, TILE: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """As `unpack_kernel` for unsigned numbers with `count` groups in a row, of `group` columns or, ORDERED, those of
    `of_column`."""
    place = tl.program_id(1).to(tl.int64)
    expert = first + place
    if ROUTED:  # noqa: SIM102  # the first is known when it is compiled
        if tl.load(starts + expert) == tl.load(starts + expert + 1):
            return
    for tile in range(tl.program_id(0) * TILES, tl.program_id(0) * TILES + TILES):
        at = tile * TILE + tl.arange(0, TILE)
        there = at < bytes_each
        held = tl.load(numbers + expert * bytes_each + at, mask=there, other=0).to(tl.int32)
        row = at // row_bytes
        column = at - row * row_bytes
        if FOUR:
            column = column * 2
            low = _of_group(
                held & 15, row, column, there, expert, scales, zeros, of_column, scales_each, columns, count, group, 8,
                ZEROS, ORDERED,
            )  # fmt: skip
            high = _of_group(
                held >> 4, row, column + 1, there, expert, scales, zeros, of_column, scales_each, columns, count, group, 8,
                ZEROS, ORDERED,
            )  # fmt: skip
            to = place * weights_each + row.to(tl.int64) * columns + column
            tl.store(out + to, low.to(out.dtype.element_ty), mask=there)
            tl.store(out + to + 1, high.to(out.dtype.element_ty), mask=there & (column + 1 < columns))
        else:
            value = _of_group(
                held, row, column, there, expert, scales, zeros, of_column, scales_each, columns, count, group, 128,
                ZEROS, ORDERED,
            )  # fmt: skip
            tl.store(out + place * weights_each + at, value.to(out.dtype.element_ty), mask=there)


@triton.jit
def _of_group(
    code, row, column, there, expert, scales, zeros, of_column, scales_each, columns, count, group, HALF: tl.constexpr,
    ZEROS: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """What codes of these rows and columns stand for, in float32."""
    there = there & (column < columns)
    if ORDERED:
        of = tl.load(of_column + expert * columns + column, mask=there, other=0)
    else:
        of = column // group
    at = expert * scales_each + row * count + of
    scale = tl.load(scales + at, mask=there, other=0.0).to(tl.float32)
    zero = tl.load(zeros + at, mask=there, other=0).to(tl.float32) if ZEROS else HALF * 1.0
    return (code.to(tl.float32) - zero) * scale


def unpack(held: Any, form: Any, first: int, out: Tensor, starts: Tensor | None) -> None:
    """Writes the experts from the number `first` on into `out` [n, rows, columns], of any float format.

    `held` and `form` are those of `PackedExperts`. With `starts` [E + 1] those without rows are left out. Products and sums
    are not fused, so that they round as theirs do.
    """
    weights, four = form.rows * form.columns, form.kind != "int8"
    bytes_each, scales_each = held.numbers.shape[1], held.scales.shape[1]
    grid = triton.cdiv(bytes_each, TILE * TILES), out.shape[0]
    routed = {"ROUTED": starts is not None, "TILE": TILE, "TILES": TILES, "num_warps": 4}
    starts = held.scales if starts is None else starts
    if form.kind == "fp8":
        unpack_fp8_kernel[grid](
            starts, held.numbers, held.scales, out, first, scales_each, weights, form.columns,
            triton.cdiv(form.columns, form.block), form.scale_block, form.block, **routed,
        )  # fmt: skip
        return
    if form.kind in ("uint4", "uint8"):
        unpack_groups_kernel[grid](
            starts, held.numbers, held.scales, held.scales if held.zeros is None else held.zeros,
            held.scales if held.of_column is None else held.of_column, out, first, bytes_each, scales_each, weights,
            form.columns, bytes_each // form.rows, scales_each // form.rows, form.block, FOUR=form.kind == "uint4",
            ZEROS=held.zeros is not None, ORDERED=held.of_column is not None, **routed,
        )  # fmt: skip
        return
    if form.kind in ("mxfp4", "nvfp4"):
        row_bytes = bytes_each // form.rows
        unpack_blocks_kernel[grid](
            starts, held.numbers, held.scales, held.scales if held.middle is None else held.middle, out, first, bytes_each,
            scales_each, weights, form.columns, row_bytes, BLOCK=form.block, WHOLE=held.middle is not None,
            PADDED=form.columns != 2 * row_bytes, **routed,
        )  # fmt: skip
        return
    unpack_kernel[grid](
        starts, held.numbers, held.scales,
        *((held.middle, held.steps, held.code, held.scale_code) if four else [held.scales] * 4),
        out, first, bytes_each, scales_each, held.steps.shape[1] if four else 0, weights, form.columns,
        BLOCK=form.block, SCALE_BLOCK=form.scale_block, FOUR=four, enable_fp_fusion=False, **routed,
    )  # fmt: skip
