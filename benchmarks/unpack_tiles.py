"""Tiles of the launch that unpacks experts, on one CUDA device: the one picked by hand and the fastest, of every kind.

    python benchmarks/unpack_tiles.py [KIND ...]

Gate and up of Qwen3-30B-A3B: 128 experts of 1,536 x 2,048 into bfloat16. A tile is bytes that one program reads at a time, how often
it does, and of four bits how many are on their way. Every tile must give the same numbers.
"""

from __future__ import annotations

import argparse
from itertools import product as crossed

import torch
from dense_kernels import timed
from moe_experts import KINDS, held_in

from engine.kernels.experts import unpack as unpacking

TILES = [*crossed((1024, 2048, 4096), (1, 2, 4, 8, 16), (1, 2, 3))]
AHEAD = 3_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=KINDS)
    own = unpacking.TILE, unpacking.TILES, unpacking.STAGES
    weight = torch.randn(128, 1536, 2048, device="cuda").bfloat16() * 0.02
    out = torch.empty_like(weight)
    for kind in parser.parse_args().kinds:
        held = held_in(kind, weight)
        wanted, found = held.all_unpacked(), []
        for tile in [own, *(each for each in TILES if each != own and (kind != "fp8" or each[2] == 1))]:
            unpacking.TILE, unpacking.TILES, unpacking.STAGES = tile
            out.zero_()
            held.unpack_range(0, out)
            if not torch.equal(out, wanted):
                raise SystemExit(f"{kind} {tile}: the numbers differ")
            times = [timed(lambda held=held: held.unpack_range(0, out), AHEAD) for _ in range(9)]
            found.append((sorted(times)[4], tile))
        moved = held.packed_bytes + out.numel() * 2
        told = ", ".join(f"{tile} {ms:.4f}" for ms, tile in sorted(found)[:6])
        print(f"{kind}: {moved / 1e9:.2f} GB; by hand {own} {found[0][0]:.4f} ms; fastest {told}", flush=True)
        unpacking.TILE, unpacking.TILES, unpacking.STAGES = own


if __name__ == "__main__":
    main()
