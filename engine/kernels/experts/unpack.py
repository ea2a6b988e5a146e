"""Routed experts unpacked in one launch, bit for bit as bitsandbytes, or plain torch, unpacks each of them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.device import interpreted
from engine.kernels.experts.decoding import e4m3, in_lanes, numbers_of, scales_of

TILE, TILES, STAGES = 1024, 8, 1
"""Bytes of packed numbers that one program reads at a time, how often it does, and of four bits how many are on their way."""
BESIDE = 3, 4096, 3
"""Beside a product: programs of a multiprocessor, bytes that one reads at a time, and how many of these are on their way."""
INT8 = tl.constexpr(7.874015718698502e-3)
"""1 / 127, as bitsandbytes writes it."""


@triton.jit(do_not_specialize=["first"])
def unpack_kernel(
    starts, held, out, first, bytes_each, scales_each, steps_each, weights_each, columns, row_bytes,
    KIND: tl.constexpr, BLOCK: tl.constexpr, SCALE_BLOCK: tl.constexpr, LANES: tl.constexpr, PADDED: tl.constexpr,
    ROUTED: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Some tiles of an expert in four bits: `out[place]` is what the numbers of `first + place` stand for, where that has rows;
    PADDED where rows end in a block that is not full."""
    place = tl.program_id(1).to(tl.int64)
    expert = first + place
    if ROUTED:  # noqa: SIM102  # the first is known when it is compiled
        if tl.load(starts + expert) == tl.load(starts + expert + 1):
            return
    table = in_lanes(held[4]) if LANES else held[4]
    BLOCKS: tl.constexpr = 2 * TILE // BLOCK if 2 * TILE > BLOCK else 1
    for tile in tl.range(tl.program_id(0) * TILES, tl.program_id(0) * TILES + TILES, num_stages=STAGES):
        block = tile * (2 * TILE) // BLOCK + tl.arange(0, BLOCKS)
        scale = scales_of(held, expert, block, scales_each, steps_each, block < scales_each, KIND, SCALE_BLOCK)
        run = tile * BLOCKS + tl.arange(0, BLOCKS)
        at = run[:, None] * (TILE // BLOCKS) + tl.arange(0, TILE // BLOCKS)[None, :]
        codes = tl.load(held[0] + expert * bytes_each + at, mask=at < bytes_each, other=0)
        value = tl.reshape(numbers_of(codes, table, KIND, LANES), [BLOCKS, 2 * TILE // BLOCKS]) * scale[:, None]
        value = tl.reshape(value.to(out.dtype.element_ty), [2 * TILE])
        both = tile * (2 * TILE) + tl.arange(0, 2 * TILE)
        if PADDED:
            column = both % (2 * row_bytes)
            kept = (both < 2 * bytes_each) & (column < columns)
            both = both // (2 * row_bytes) * columns + column
        else:
            kept = both < weights_each
        tl.store(out + place * weights_each + both, value, mask=kept)


@triton.jit(do_not_specialize=["first"])
def unpack_int8_kernel(
    starts, numbers, scales, out, first, scales_each, weights_each, columns,
    ROUTED: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """As `unpack_kernel` for INT8, with a scale for each row."""
    place = tl.program_id(1).to(tl.int64)
    expert = first + place
    if ROUTED:  # noqa: SIM102  # the first is known when it is compiled
        if tl.load(starts + expert) == tl.load(starts + expert + 1):
            return
    for tile in range(tl.program_id(0) * TILES, tl.program_id(0) * TILES + TILES):
        at = tile * TILE + tl.arange(0, TILE)
        there = at < weights_each
        held = tl.load(numbers + expert * weights_each + at, mask=there, other=0)
        row = tl.load(scales + expert * scales_each + at // columns, mask=there, other=0.0)
        value = (held.to(tl.float32) * row * INT8).to(out.dtype.element_ty)
        tl.store(out + place * weights_each + at, value, mask=there)


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
        tl.store(out + place * weights_each + at, (e4m3(held) * scale).to(out.dtype.element_ty), mask=there)


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


@cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


def in_lanes_of(kind: str) -> bool:
    """Whether the numbers that codes of this kind stand for lie in the lanes of a warp, which only a card's can ask, and by
    NVIDIA's instruction."""
    return kind in ("nf4", "fp4") and not interpreted() and torch.version.hip is None


def pointers(held: Any) -> tuple[Tensor, ...]:
    """The parts as kernels take them: something in the place of those that a kind has not, which is not read."""
    parts = held.middle, held.steps, held.code, held.scale_code
    return held.numbers, held.scales, *(held.numbers if each is None else each for each in parts)


def unpack(held: Any, form: Any, first: int, out: Tensor, starts: Tensor | None, beside: bool = False) -> None:
    """Writes the experts from the number `first` on into `out` [n, rows, columns], of any float format.

    `held` and `form` are those of `PackedExperts`. With `starts` [E + 1] those without rows are left out. Products and sums
    are not fused, so that they round as theirs do. `beside` another launch it takes a few programs of each multiprocessor alone.
    """
    weights = form.rows * form.columns
    bytes_each, scales_each = held.numbers.shape[1], held.scales.shape[1]
    tile, tiles, stages = TILE, TILES, STAGES
    if beside:
        programs, tile, stages = BESIDE
        programs *= _multiprocessors(out.device)
        tiles = triton.cdiv(triton.cdiv(bytes_each, tile), max(1, programs // out.shape[0]))
    grid = triton.cdiv(bytes_each, tile * tiles), out.shape[0]
    routed = {"ROUTED": starts is not None, "TILE": tile, "TILES": tiles, "num_warps": 4}
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
    if form.kind == "int8":
        unpack_int8_kernel[grid](
            starts, held.numbers, held.scales, out, first, scales_each, weights, form.columns, enable_fp_fusion=False,
            **routed,
        )  # fmt: skip
        return
    row_bytes = bytes_each // form.rows if form.kind in ("mxfp4", "nvfp4") else 0
    unpack_kernel[grid](
        starts, pointers(held), out, first, bytes_each, scales_each, 0 if held.steps is None else held.steps.shape[1],
        weights, form.columns, row_bytes, STAGES=stages, KIND=form.kind, BLOCK=form.block, SCALE_BLOCK=form.scale_block, LANES=in_lanes_of(form.kind),
        PADDED=row_bytes > 0 and form.columns != 2 * row_bytes, enable_fp_fusion=False, **routed,
    )  # fmt: skip
