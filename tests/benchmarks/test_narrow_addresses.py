"""The kernels with narrow addresses that a benchmark times beside ours are ours otherwise, and are run in their place."""

from __future__ import annotations

from tests.benchmarks.interpreted import needs_triton, run

CODE = """
import sys, tempfile
from pathlib import Path
import torch
import narrow_addresses as tried
from engine.kernels.experts import expert_mlp, launch
module, count = tried.narrow_kernels(Path(tempfile.mkdtemp()))
assert count > 10, count
import inspect
assert "int64" not in inspect.getsource(module).replace('tl.int64)\\n', '')
torch.manual_seed(0)
x, ids, routing = torch.randn(5, 32), torch.randint(0, 4, (5, 2)), torch.rand(5, 2)
weights = torch.randn(4, 48, 32), torch.randn(4, 32, 24)
wide = expert_mlp(x, ids, routing, *weights)
seen = []
kernel = module.up_kernel
class Seen:
    def __getitem__(self, grid):
        seen.append(grid)
        return kernel[grid]
module.up_kernel = Seen()
with tried.in_place_of_ours(module):
    narrow = expert_mlp(x, ids, routing, *weights)
assert seen, "not run"
assert torch.equal(wide, narrow)
assert expert_mlp(x, ids, routing, *weights).equal(wide) and len(seen) == 1
"""


@needs_triton
def test_narrow_kernels_run_in_the_place_of_ours() -> None:
    run(CODE)
