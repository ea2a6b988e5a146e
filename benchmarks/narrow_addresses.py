"""What addresses of 64 bits cost the kernels of experts: the same step with all of them in 32, in turns, on one CUDA device.

    python benchmarks/narrow_addresses.py [WORK ...] [--results FILE] [--commit HASH]

Works are those of `moe_experts.py`, two of them without any named. Rows of the results are `moe_lora_addresses`, `ours` and
`ours, 32-bit addresses`. Where a tensor has more than 2^31 numbers the second would be wrong: it is for shapes that have not,
and both must give the same numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import inspect
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch
from _figures import Results, result_options
from dense_kernels import contest
from moe_experts import WORKS, Block

from engine.kernels.experts import kernels

WIDE, NARROW = ".to(tl.int64)", ".to(tl.int32)"


def narrow_kernels(folder: Path) -> tuple[ModuleType, int]:
    """The kernels of experts with every widened offset left in 32 bits, and how many there were."""
    source = inspect.getsource(kernels)
    file = folder / "narrow_kernels.py"
    file.write_text(source.replace(WIDE, NARROW))
    spec = importlib.util.spec_from_file_location("narrow_kernels", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, source.count(WIDE)


@contextlib.contextmanager
def in_place_of_ours(module: ModuleType) -> Iterator[None]:
    """Launches take these kernels, which they import as they are made."""
    sys.modules[kernels.__name__] = module
    try:
        yield
    finally:
        sys.modules[kernels.__name__] = kernels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="*", default=["even", "many"])
    result_options(parser)
    options = parser.parse_args()
    results = Results(options, torch.cuda.get_device_name(), "torch", "triton")
    with tempfile.TemporaryDirectory() as folder:
        module, count = narrow_kernels(Path(folder))
        print(f"{count} offsets are widened", flush=True)
        for name in options.works:
            block = Block(WORKS[name])
            step = block.ours()

            def narrow(step=step):
                with in_place_of_ours(module):
                    return step()

            if not all(map(torch.equal, step(), narrow())):
                raise SystemExit(f"{block.work.shape}: the numbers differ")
            entrants = {"ours": step, "ours, 32-bit addresses": narrow}
            contest("moe_lora_addresses", block.work.shape, block.work.floor, entrants, results)


if __name__ == "__main__":
    main()
