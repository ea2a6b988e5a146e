"""The kernels with narrow addresses that a benchmark times beside ours are ours otherwise, and are run in their place."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
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


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_narrow_kernels_run_in_the_place_of_ours() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{FOLDER}{os.pathsep}{FOLDER.parent}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
