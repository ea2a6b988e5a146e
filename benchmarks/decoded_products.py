"""Experts in MXFP4: decoded inside the product beside unpacked first, forward and for the gradient of the input, on one CUDA device.

    python benchmarks/decoded_products.py [TOKENS ...] [--results FILE] [--commit HASH]

Shape: gate and up of Qwen3-30B-A3B (E128 H2048 I768 top-8), bfloat16, no adapters. `unpacked, product` unpacks all experts that
have rows by one launch and multiplies by the kernel that runs make; `16 bits` is that product alone. `decoded inside` reads the four bits
in the product, each tile of rows anew, by the best of its tiles. MXFP4 is decoded by shifts alone, which no other format is: where
this does not win, a table or second scales do not either. Every result is the unpacked one's to rounding.
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
from torch import Tensor

from engine.kernels.experts import launch
from engine.kernels.experts.launch import Plan, planned, rows_of_a_tile
from engine.kernels.experts.packed import PackedExperts, Packer
from engine.kernels.experts.unpack import _e2m1, _power

BYTES_PER_MS, FLOP_PER_MS = 3.0e9, 790e9
EXPERTS, HIDDEN, WIDTH, TOP_K = 128, 2048, 1536, 8
TILES = [*crossed((64, 128, 256), (64, 128), (4, 8), (2, 3))]
"""Columns and depth of a tile, warps and stages."""
Step = Callable[[], Tensor]


@triton.jit
def decoded_kernel(
    x_ptr, numbers_ptr, scales_ptr, order_ptr, tile_expert_ptr, tile_row_ptr, starts_ptr, out_ptr,
    experts, stored_rows, stored_columns, columns, depth, top_k,
    TURNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Rows, by slot, through a weight [E, stored_rows, stored_columns] in MXFP4, or TURNED through its transpose's
    transpose. Columns and depth are multiples of the tile's. Grid (tiles, columns / COLUMNS)."""
    tile = tl.program_id(0)
    expert = tl.load(tile_expert_ptr + tile)
    if expert >= experts:
        return
    row = tl.load(tile_row_ptr + tile) + tl.arange(0, ROWS)
    end = tl.load(starts_ptr + expert + 1)
    real = row < end
    slot = tl.load(order_ptr + tl.minimum(row, end - 1))
    source = (slot // top_k).to(tl.int64)
    first = tl.program_id(1) * COLUMNS
    numbers = numbers_ptr + expert.to(tl.int64) * (stored_rows * stored_columns // 2)
    scales = scales_ptr + expert.to(tl.int64) * (stored_rows * stored_columns // 32)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in range(0, depth, DEPTH):
        x = tl.load(x_ptr + source[:, None] * depth + at + tl.arange(0, DEPTH)[None, :], mask=real[:, None], other=0.0)
        if TURNED:  # the contraction runs over stored rows
            line = at + tl.arange(0, DEPTH)
            byte = first // 2 + tl.arange(0, COLUMNS // 2)
        else:
            line = first + tl.arange(0, COLUMNS)
            byte = at // 2 + tl.arange(0, DEPTH // 2)
        held = tl.load(numbers + line[:, None] * (stored_columns // 2) + byte[None, :]).to(tl.int32)
        scale = _power(tl.load(scales + line[:, None] * (stored_columns // 32) + byte[None, :] // 16).to(tl.int32))
        low = (_e2m1(held & 15) * scale).to(x.dtype)
        high = (_e2m1(held >> 4) * scale).to(x.dtype)
        w = tl.interleave(low, high)
        acc = tl.dot(x, w if TURNED else tl.trans(w), acc)
    places = out_ptr + slot.to(tl.int64)[:, None] * columns + first + tl.arange(0, COLUMNS)[None, :]
    tl.store(places, acc.to(out_ptr.dtype.element_ty), mask=real[:, None])


def decoded(
    x: Tensor, held: PackedExperts, plan: Plan, rows: int, top_k: int, turned: bool, tile: tuple[int, ...]
) -> Tensor:
    """Rows of x [T, K] by slot [S, N] through the experts, or with `turned` from what they give to what they take."""
    form, experts = held.form, held.shape[0]
    columns, depth = (form.columns, form.rows) if turned else (form.rows, form.columns)
    wide, deep, warps, stages = tile
    out = x.new_empty(plan.order.shape[0], columns)
    decoded_kernel[(plan.tiles, columns // wide)](
        x, held.held.numbers, held.held.scales, plan.order, plan.tile_expert, plan.tile_row, plan.starts, out,
        experts, form.rows, form.columns, columns, depth, top_k,
        TURNED=turned, ROWS=rows, COLUMNS=wide, DEPTH=deep, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def packed_experts(weight: Tensor) -> PackedExperts:
    packer = Packer(len(weight), "mxfp4", weight.dtype)
    for expert in weight:
        packer.add(expert)
    return packer.done()


def best(step: Callable[[tuple[int, ...]], Tensor]) -> tuple[int, ...]:
    """The tile that takes the least time; one that asks for more than the card has is passed over."""
    found = []
    for tile in TILES:
        try:
            step(tile)
            torch.cuda.synchronize()
        except (RuntimeError, triton.runtime.errors.OutOfResources):
            continue
        found.append((min(timed(lambda tile=tile: step(tile)) for _ in range(3)), tile))
    return min(found)[1]


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

    tile = best(lambda tile: decoded(x, held, plan, rows, top_k, turned, tile))
    print(f"decoded inside: tile {tile}", flush=True)
    return {
        "decoded inside": lambda: decoded(x, held, plan, rows, top_k, turned, tile),
        "unpacked, product": unpacked,
        "16 bits": lambda: through(weight),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", nargs="*", type=int, default=[16, 64, 256, 1024, 4096, 16_384])
    result_options(parser)
    options = parser.parse_args()
    results = Results(options, torch.cuda.get_device_name(), "torch", "triton")
    torch.manual_seed(0)
    drawn = torch.randn(EXPERTS, WIDTH, HIDDEN, device="cuda", dtype=torch.bfloat16) * 0.02
    held = packed_experts(drawn)
    weight = held.all_unpacked()
    for tokens in options.tokens:
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
            contest("moe_decoded_mxfp4", shape_of, floor, steps, results)


if __name__ == "__main__":
    main()
