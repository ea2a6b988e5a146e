"""Routed experts unpacked in one launch, bit for bit as bitsandbytes unpacks each of them."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

TILE = 1024
"""Bytes of packed numbers that one program reads."""
INT8 = tl.constexpr(7.874015718698502e-3)
"""1 / 127, as bitsandbytes writes it."""


@triton.jit
def unpack_kernel(
    experts, numbers, scales, middle, steps, code, scale_code, out,
    bytes_each, scales_each, steps_each, weights_each, columns,
    BLOCK: tl.constexpr, SCALE_BLOCK: tl.constexpr, FOUR: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One tile of one routed expert: `out[place]` is what `numbers[experts[place]]` stands for."""
    place = tl.program_id(1).to(tl.int64)
    expert = tl.load(experts + place).to(tl.int64)
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
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
        both = tl.program_id(0) * (2 * TILE) + tl.arange(0, 2 * TILE)
        tl.store(to + both, tl.interleave(first, second), mask=both < weights_each)
    else:
        row = tl.load(scales + expert * scales_each + at // columns, mask=there, other=0.0)
        tl.store(to + at, (held.to(tl.float32) * row * INT8).to(out.dtype.element_ty), mask=there)


def unpack(held: Any, form: Any, experts: Tensor, out: Tensor) -> None:
    """Writes the experts by their numbers `experts` [n] into `out` [n, rows, columns], of any float format.

    `held` and `form` are those of `PackedExperts`. Products and sums are not fused, so that they round as theirs do.
    """
    weights, four = form.rows * form.columns, form.kind != "int8"
    bytes_each = held.numbers.shape[1]
    unpack_kernel[triton.cdiv(bytes_each, TILE), experts.shape[0]](
        experts, held.numbers, held.scales, *((held.middle, held.steps, held.code, held.scale_code) if four else [held.scales] * 4),
        out, bytes_each, held.scales.shape[1], held.steps.shape[1] if four else 0, weights, form.columns,
        BLOCK=form.block, SCALE_BLOCK=form.scale_block, FOUR=four, TILE=TILE, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
