"""Experts in four bits: decoded inside the product beside unpacked first, forward and for the gradient of the input, on one CUDA device.

    python benchmarks/decoded_products.py [TOKENS ...] [--kind nf4 ...] [--results FILE] [--commit HASH]

Shape: gate and up of Qwen3-30B-A3B (E128 H2048 I768 top-8), bfloat16, no adapters. `unpacked, product` unpacks all experts that
have rows by one launch and multiplies by the kernel that runs make; `16 bits` is that product alone. `decoded inside` reads the four bits
in the product, each tile of rows anew, by the best of its tiles. Every result is the unpacked one's to rounding.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product as crossed

import torch
import triton
import triton.language as tl
from _figures import Results, result_options
from dense_kernels import contest, timed
from moe_experts import held_in
from torch import Tensor

from engine.kernels.experts import launch
from engine.kernels.experts.e2m1 import VALUES
from engine.kernels.experts.kernels import _place
from engine.kernels.experts.launch import Plan, planned, rows_of_a_tile
from engine.kernels.experts.packed import PackedExperts

BYTES_PER_MS, FLOP_PER_MS = 3.0e9, 790e9
EXPERTS, HIDDEN, WIDTH, TOP_K = 128, 2048, 1536, 8
FEW_ROWS = (64, 128, 4, 4), (128, 128, 4, 3), (64, 64, 4, 4), (128, 64, 4, 4), (32, 128, 4, 4)
MANY_ROWS = (128, 64, 4, 3), (128, 64, 8, 3), (256, 64, 8, 3), (64, 64, 4, 4), (128, 128, 8, 3), (64, 128, 4, 3)
"""Columns and depth of a tile, warps and stages, and whether codes are looked up in a table that lies in the lanes."""
Step = Callable[[], Tensor]


@triton.jit
def _entry(code):
    """Each lane's own one of sixteen numbers: a scalar to Triton, another in every lane."""
    lane = tl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r", [], dtype=tl.int32, is_pure=True, pack=1)
    return tl.load(code + (lane & 15))


@triton.jit
def _looked_up(entry, codes):
    """The numbers that codes stand for, of which the low four bits count, asked of other lanes."""
    ask: tl.constexpr = "shfl.sync.idx.b32 $0, $1, $2, 0x101f, 0xffffffff;"
    return tl.inline_asm_elementwise(ask, "=f,f,r", [entry, codes], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _by_bits(codes):
    bits = ((codes & 7) << 22) | ((codes & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def _scale(scales, middle, steps, scale_code, at, KIND: tl.constexpr):
    coded = tl.load(scales + at).to(tl.int32)
    if KIND == "nf4":
        scale = tl.load(scale_code + coded) * tl.load(steps + at // 256) + middle
    elif KIND == "mxfp4":
        scale = (coded << 23).to(tl.float32, bitcast=True)
    else:
        scale = ((coded & 127) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36 * middle
    return scale


@triton.jit
def decoded_kernel(
    x_ptr, numbers, scales, middle, steps, code, scale_code, order_ptr, tile_expert_ptr, tile_row_ptr, starts_ptr, out_ptr,
    experts, stored_rows, stored_columns, steps_each, columns, depth, top_k, tiles,
    KIND: tl.constexpr, BLOCK: tl.constexpr, TABLE: tl.constexpr,
    TURNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Rows, by slot, through a weight [E, stored_rows, stored_columns] in four bits, or TURNED through its transpose's
    transpose. Columns and depth are multiples of the tile's. Grid (tiles * columns / COLUMNS,)."""
    tile, block_of = _place(tl.program_id(0), tiles, columns // COLUMNS, 8)
    expert = tl.load(tile_expert_ptr + tile)
    if expert >= experts:
        return
    row = tl.load(tile_row_ptr + tile) + tl.arange(0, ROWS)
    end = tl.load(starts_ptr + expert + 1)
    real = row < end
    slot = tl.load(order_ptr + tl.minimum(row, end - 1))
    source = (slot // top_k).to(tl.int64)
    first = block_of * COLUMNS
    numbers += expert.to(tl.int64) * (stored_rows * stored_columns // 2)
    scales += expert.to(tl.int64) * (stored_rows * stored_columns // BLOCK)
    steps += expert.to(tl.int64) * steps_each
    whole = tl.load(middle + expert)
    if TABLE:
        entry = _entry(code)
    LINES: tl.constexpr = DEPTH if TURNED else COLUMNS
    WIDE: tl.constexpr = COLUMNS if TURNED else DEPTH
    BLOCKS: tl.constexpr = WIDE // BLOCK if WIDE > BLOCK else 1
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in range(0, depth, DEPTH):
        x = tl.load(x_ptr + source[:, None] * depth + at + tl.arange(0, DEPTH)[None, :], mask=real[:, None], other=0.0)
        line = (at if TURNED else first) + tl.arange(0, LINES)
        begun = first if TURNED else at
        byte = begun // 2 + tl.arange(0, WIDE // 2)
        held = tl.load(numbers + line[:, None] * (stored_columns // 2) + byte[None, :]).to(tl.int32)
        block = line[:, None] * (stored_columns // BLOCK) + begun // BLOCK + tl.arange(0, BLOCKS)[None, :]
        scale = _scale(scales, whole, steps, scale_code, block, KIND)
        if KIND == "nf4":
            one, other = held >> 4, held
        else:
            one, other = held, held >> 4
        if TABLE:
            one, other = _looked_up(entry, one), _looked_up(entry, other)
        else:
            one, other = _by_bits(one), _by_bits(other)
        w = tl.reshape(tl.join(one, other), [LINES, BLOCKS, WIDE // BLOCKS])
        w = tl.reshape((w * scale[:, :, None]).to(x.dtype), [LINES, WIDE])
        acc = tl.dot(x, w if TURNED else tl.trans(w), acc)
    places = out_ptr + slot.to(tl.int64)[:, None] * columns + first + tl.arange(0, COLUMNS)[None, :]
    tl.store(places, acc.to(out_ptr.dtype.element_ty), mask=real[:, None])


def decoded(
    x: Tensor, held: PackedExperts, plan: Plan, rows: int, top_k: int, turned: bool, tile: tuple[int, ...]
) -> Tensor:
    """Rows of x [T, K] by slot [S, N] through the experts, or with `turned` from what they give to what they take."""
    form, experts, parts = held.form, held.shape[0], held.held
    columns, depth = (form.columns, form.rows) if turned else (form.rows, form.columns)
    wide, deep, warps, stages, table = tile
    out = x.new_empty(plan.order.shape[0], columns)
    code = torch.tensor(VALUES, device=x.device) if parts.code is None else parts.code
    none = code
    decoded_kernel[(plan.tiles * (columns // wide),)](
        x, parts.numbers, parts.scales, none if parts.middle is None else parts.middle,
        none if parts.steps is None else parts.steps, code, none if parts.scale_code is None else parts.scale_code,
        plan.order, plan.tile_expert, plan.tile_row, plan.starts, out,
        experts, form.rows, form.columns, 0 if parts.steps is None else parts.steps.shape[1], columns, depth, top_k, plan.tiles,
        KIND=form.kind, BLOCK=form.block, TABLE=bool(table),
        TURNED=turned, ROWS=rows, COLUMNS=wide, DEPTH=deep, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def best(kind: str, step: Callable[[tuple[int, ...]], Tensor], rows: int) -> tuple[int, ...]:
    """The tile that takes the least time; one that asks for more than the card has is passed over."""
    found = []
    for tile, table in crossed(MANY_ROWS if rows >= 64 else FEW_ROWS, (1, 0) if kind != "nf4" else (1,)):
        tile = (*tile, table)
        try:
            step(tile)
            torch.cuda.synchronize()
        except (RuntimeError, triton.runtime.errors.OutOfResources):
            continue
        found.append((min(timed(lambda tile=tile: step(tile)) for _ in range(3)), tile))
    found.sort()
    print("  ".join(f"{tile} {ms:.3f}" for ms, tile in found[:6]), flush=True)
    for table in (0, 1):
        those = [each for each in found if each[1][4] == table]
        if those:
            print(f"best with {'a table' if table else 'bits'}: {those[0]}", flush=True)
    return found[0][1]


def entrants(x: Tensor, held: PackedExperts, weight: Tensor, ids: Tensor, turned: bool) -> dict[str, Step]:
    """The three ways for these tokens, or with `turned` for rows [S, N] of gradients."""
    top_k = 1 if turned else ids.shape[1]
    rows = rows_of_a_tile(ids.numel(), len(weight))
    plan = planned(ids.reshape(-1, top_k), len(weight), rows)
    room = torch.empty_like(weight)

    def through(some: Tensor) -> Tensor:
        return launch._product(x, some.transpose(1, 2) if turned else some, None, None, None, plan, rows, top_k=top_k)

    def unpacked() -> Tensor:
        held.unpack_range(0, room, plan.starts)
        return through(room)

    tile = best(held.form.kind, lambda tile: decoded(x, held, plan, rows, top_k, turned, tile), rows)
    return {
        "decoded inside": lambda: decoded(x, held, plan, rows, top_k, turned, tile),
        "unpacked, product": unpacked,
        "16 bits": lambda: through(weight),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", nargs="*", type=int, default=[4096, 1024, 256, 16_384, 16])
    parser.add_argument("--kind", nargs="*", default=["nf4", "mxfp4"])
    result_options(parser)
    options = parser.parse_args()
    results = Results(options, torch.cuda.get_device_name(), "torch", "triton")
    torch.manual_seed(0)
    drawn = torch.randn(EXPERTS, WIDTH, HIDDEN, device="cuda", dtype=torch.bfloat16) * 0.02
    for kind in options.kind:
        held = held_in(kind, drawn)
        measured(held, options.tokens, results)


def measured(held: PackedExperts, counts: list[int], results: Results) -> None:
    """Every way at these counts of tokens."""
    weight = held.all_unpacked()
    for tokens in counts:
        ids = torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K, -1).indices
        for turned in (False, True):
            shape = (tokens * TOP_K, WIDTH) if turned else (tokens, HIDDEN)
            x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
            steps = entrants(x, held, weight, ids, turned)
            ours, theirs = steps["decoded inside"]().float(), steps["16 bits"]().float()
            if (ours - theirs).norm() > 1e-2 * theirs.norm():
                raise SystemExit(f"{tokens} tokens: what is decoded inside differs")
            routed = len(ids.unique())
            reads = routed * WIDTH * HIDDEN * 2 / BYTES_PER_MS
            floor = max(2 * tokens * TOP_K * WIDTH * HIDDEN / FLOP_PER_MS, reads / 4)
            way = "to the input" if turned else "forward"
            shape_of = f"E{EXPERTS} H{HIDDEN} I{WIDTH // 2} k{TOP_K} T{tokens} {way}"
            contest(f"moe_decoded_{held.form.kind}", shape_of, floor, steps, results)


if __name__ == "__main__":
    main()
