"""What packed numbers stand for, on the card: shared by the launch that unpacks experts and by products that decode them inside.

Bit for bit as bitsandbytes, or plain torch, unpacks them, where products and sums are not fused (`enable_fp_fusion`).
Names: `held` are the parts of a `Held` as a tuple of pointers (numbers, scales, middle, steps, code, scale_code), of which a kind
reads its own.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def e2m1(code):
    """What the low four bits stand for, in float32: its bits at their place there make it 2^-126 of what it is."""
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def finite_e4m3(code):
    """What eight bits stand for that stand for a number, in float32: its bits at their place there make it 2^-120 of that."""
    bits = ((code & 127) << 20) | ((code & 128) << 24)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def e4m3(code):
    """What eight bits stand for, in float32."""
    return tl.where((code & 127) == 127, float("nan"), finite_e4m3(code))


@triton.jit
def power(scale):
    """2^(scale - 127) in float32, of which the smallest has no bit of an exponent; 255 is not a number."""
    bits = tl.where(scale == 0, 1 << 22, tl.where(scale == 255, 0x7FC00000, scale << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def in_lanes(code):
    """One of sixteen numbers in each lane of a warp: to Triton a scalar, though each lane holds another."""
    lane = tl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r", [], dtype=tl.int32, is_pure=True, pack=1)
    return tl.load(code + (lane & 15))


@triton.jit
def _asked(table, code):
    """The number of the lane that the low four bits name: one instruction, where a table in memory is asked for each apart."""
    ask: tl.constexpr = "shfl.sync.idx.b32 $0, $1, $2, 0x101f, 0xffffffff;"
    return tl.inline_asm_elementwise(ask, "=f,f,r", [table, code], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _number(code, table, KIND: tl.constexpr, LANES: tl.constexpr):
    """What codes stand for before they are scaled, float32; of four bits the low ones count. `table` is a pointer or, in LANES,
    what `in_lanes` gave."""
    if KIND == "fp8":
        value = finite_e4m3(code)
    elif KIND == "mxfp4" or KIND == "nvfp4":
        value = e2m1(code)
    elif LANES:
        value = _asked(table, code)
    else:
        value = tl.load(table + (code & 15))
    return value


@triton.jit
def numbers_of(held, table, KIND: tl.constexpr, LANES: tl.constexpr):
    """Both numbers of bytes [...] that hold two, [..., 2], or the one that they hold; unscaled, float32."""
    code = held.to(tl.int32)
    if KIND == "fp8":
        value = _number(code, table, KIND, LANES)
    elif KIND == "mxfp4" or KIND == "nvfp4":  # the first lies in the low bits
        value = tl.join(_number(code, table, KIND, LANES), _number(code >> 4, table, KIND, LANES))
    else:
        value = tl.join(_number(code >> 4, table, KIND, LANES), _number(code, table, KIND, LANES))
    return value


@triton.jit
def scales_of(held, expert, at, scales_each, steps_each, there, KIND: tl.constexpr, SCALE_BLOCK: tl.constexpr):
    """The scales of an expert's blocks `at`, of any shape, float32; those that are not `there` are any, None means all are."""
    _, scales, middle, steps, _, scale_code = held
    at_first = expert.to(tl.int64) * scales_each
    scale = tl.load(scales + at_first + at) if there is None else tl.load(scales + at_first + at, mask=there, other=0)
    if KIND == "mxfp4":
        scale = power(scale.to(tl.int32))
    elif KIND == "nvfp4":
        scale = e4m3(scale.to(tl.int32)) * tl.load(middle + expert)
    elif KIND != "fp8":
        step = steps + expert.to(tl.int64) * steps_each + at // SCALE_BLOCK
        step = tl.load(step) if there is None else tl.load(step, mask=there, other=0.0)
        scale = tl.load(scale_code + scale.to(tl.int32)) * step + tl.load(middle + expert)
    return scale


@triton.jit
def decoded_tile(
    held, table, expert, line, begun, rows, columns, dtype: tl.constexpr,
    LINES: tl.constexpr, WIDE: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, SCALE_BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """[LINES, WIDE] numbers of an expert that is stored as [rows, columns]: its rows `line`, from the column `begun` on.

    A block of scales lies in a tile, or a tile in a block, so that each scale is read once a row of a tile.
    """
    EIGHT: tl.constexpr = KIND == "fp8"
    PER: tl.constexpr = 1 if EIGHT else 2
    BLOCKS: tl.constexpr = WIDE // BLOCK if WIDE > BLOCK else 1
    across = tl.cdiv(columns, BLOCK)
    scale_line = line // SCALE_BLOCK if EIGHT else line
    scale_lines = tl.cdiv(rows, SCALE_BLOCK) if EIGHT else rows
    at = scale_line[:, None] * across + begun // BLOCK + tl.arange(0, BLOCKS)[None, :]
    steps_each = tl.cdiv(rows * across, SCALE_BLOCK)
    scale = scales_of(held, expert, at, scale_lines * across, steps_each, None, KIND, SCALE_BLOCK)
    row_bytes = columns // PER
    numbers = held[0] + expert.to(tl.int64) * (rows * row_bytes)
    byte = tl.load(numbers + line[:, None] * row_bytes + begun // PER + tl.arange(0, WIDE // PER)[None, :])
    value = tl.reshape(numbers_of(byte, table, KIND, LANES), [LINES, BLOCKS, WIDE // BLOCKS]) * scale[:, :, None]
    return tl.reshape(value.to(dtype), [LINES, WIDE])
