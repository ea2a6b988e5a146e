"""One product with packed experts: decoded inside beside unpacked first and 16 bits, forward and to the input, on one CUDA device.

    python benchmarks/decoded_products.py [TOKENS ...] [--kind nf4 ...] [--results FILE] [--commit HASH]

Shape: gate and up of Qwen3-30B-A3B (E128 H2048 I768 top-8), bfloat16, no adapters. `unpacked, product` unpacks all experts that
have rows by one launch, more at once than runs do, and multiplies by the kernel that runs make; `16 bits` is that product alone.
Decoding takes the best of its tiles. Every result is the unpacked one's to rounding. Whole blocks with adapters: `moe_experts.py --packed --way "decoded inside"`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

import torch
from _figures import Results, result_options
from dense_kernels import contest, timed
from moe_experts import KINDS, held_in, told
from torch import Tensor
from triton.runtime.errors import OutOfResources

from engine.kernels.experts import launch
from engine.kernels.experts.launch import planned, rows_of_a_tile
from engine.kernels.experts.packed import PackedExperts

BYTES_PER_MS, FLOP_PER_MS = 3.0e9, 790e9
AHEAD = 3_000_000
EXPERTS, HIDDEN, WIDTH, TOP_K = 128, 2048, 1536, 8


def entrants(
    x: Tensor, held: PackedExperts, weight: Tensor, ids: Tensor, turned: bool
) -> dict[str, Callable[[], Tensor]]:
    """The three ways for these tokens, or with `turned` for rows [S, N] of gradients."""
    top_k = 1 if turned else ids.shape[1]
    rows = rows_of_a_tile(ids.numel(), len(weight))
    plan = planned(ids.reshape(-1, top_k), len(weight), rows)
    room = torch.empty_like(weight)

    def through(some: Tensor) -> Tensor:
        return launch._product(x, some.transpose(1, 2) if turned else some, None, None, None, plan, rows, top_k=top_k)

    def decoded() -> Tensor:
        with told(rows=2**20):
            return through(held)

    def unpacked() -> Tensor:
        held.unpack_range(0, room, plan.starts)
        return through(room)

    return {"decoded inside": decoded, "unpacked, product": unpacked, "16 bits": lambda: through(weight)}


def best_tile(step: Callable[[], Tensor]) -> tuple[int, ...]:
    """The tile in which decoding takes the least time of all that it may take; one that asks for more than the card has is left
    out."""
    own, found = launch.PRODUCT_DECODED, []
    for tile in own.candidates:
        launch.PRODUCT_DECODED = replace(own, candidates=(tile,))
        try:
            step()
            found.append((sorted(timed(step, AHEAD) for _ in range(7))[3], tile))
        except (RuntimeError, OutOfResources):
            continue
    launch.PRODUCT_DECODED = own
    print("  ".join(f"{tile} {ms:.3f}" for ms, tile in sorted(found)), flush=True)
    return min(found)[1]


def measured(held: PackedExperts, tokens: int, results: Results) -> None:
    """Every way at this count of tokens."""
    weight = held.all_unpacked()
    ids = torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K, -1).indices
    for turned in (False, True):
        x = torch.randn((tokens * TOP_K, WIDTH) if turned else (tokens, HIDDEN), device="cuda", dtype=torch.bfloat16)
        steps = entrants(x, held, weight, ids, turned)
        own, tile = launch.PRODUCT_DECODED, best_tile(steps["decoded inside"])
        launch.PRODUCT_DECODED = replace(own, candidates=(tile,))
        ours, theirs = steps["decoded inside"]().float(), steps["16 bits"]().float()
        if (ours - theirs).norm() > 1e-2 * theirs.norm():
            raise SystemExit(f"{tokens} tokens: what is decoded inside differs")
        reads = len(ids.unique()) * WIDTH * HIDDEN * 2 / BYTES_PER_MS
        floor = max(2 * tokens * TOP_K * WIDTH * HIDDEN / FLOP_PER_MS, reads / 4)
        shape = f"E{EXPERTS} H{HIDDEN} I{WIDTH // 2} k{TOP_K} T{tokens} {'to the input' if turned else 'forward'}"
        contest(f"moe_decoded_{held.form.kind}", shape, floor, steps, results)
        launch.PRODUCT_DECODED = own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", nargs="*", type=int, default=[16, 64, 256, 1024, 2048, 4096, 16_384])
    parser.add_argument("--kind", action="append", choices=KINDS, help="all without it")
    result_options(parser)
    options = parser.parse_args()
    results = Results(options, torch.cuda.get_device_name(), "torch", "triton")
    torch.manual_seed(0)
    drawn = torch.randn(EXPERTS, WIDTH, HIDDEN, device="cuda", dtype=torch.bfloat16) * 0.02
    for kind in options.kind or KINDS:
        held = held_in(kind, drawn)
        for tokens in options.tokens:
            measured(held, tokens, results)


if __name__ == "__main__":
    main()
