"""What addresses of 64 bits would cost the kernels of experts where 32 reach: the same step with both, in turns, on one CUDA device.

    python benchmarks/wide_addresses.py [WORK ...] [--results FILE] [--commit HASH]

Works are those of `moe_experts.py`, three of them without any named. Rows of the results are `moe_lora_addresses`, `ours` and
`ours, 64-bit addresses`, as kernels take them where a tensor has more than 2^31 numbers. Both must give the same numbers.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator

import torch
from _figures import Results, result_options
from dense_kernels import contest
from moe_experts import WORKS, Block

from engine.kernels.experts import launch


@contextlib.contextmanager
def wide_addresses() -> Iterator[None]:
    """Kernels are launched as for tensors that 32 bits do not reach."""
    own = launch.far
    launch.far = lambda *tensors: True
    try:
        yield
    finally:
        launch.far = own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="*", default=["even", "many", "long"])
    result_options(parser)
    options = parser.parse_args()
    results = Results(options, torch.cuda.get_device_name(), "torch", "triton")
    for name in options.works:
        block = Block(WORKS[name])
        step = block.ours()

        def wide(step=step):
            with wide_addresses():
                return step()

        if not all(map(torch.equal, step(), wide())):
            raise SystemExit(f"{block.work.shape}: the numbers differ")
        entrants = {"ours": step, "ours, 64-bit addresses": wide}
        contest("moe_lora_addresses", block.work.shape, block.work.floor, entrants, results)


if __name__ == "__main__":
    main()
