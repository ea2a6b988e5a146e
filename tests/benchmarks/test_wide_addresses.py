"""Offsets are wide where a number lies beyond 2^31 alone; a benchmark launches kernels with wide ones for the same numbers."""

from __future__ import annotations

import pytest

from tests.benchmarks.interpreted import needs_triton, run

CODE = """
import torch
import wide_addresses as tried
from engine.kernels.experts import expert_mlp, kernels, launch
near = torch.empty(2, 3)
assert not launch.far(near, None, torch.empty(2**16, 2**15, device="meta"))
assert launch.far(near, torch.empty(2**16, 2**15 + 1, device="meta"))
assert launch.far(torch.empty_strided((2, 3), (2**31, 1), device="meta"))
torch.manual_seed(0)
x, ids, routing = torch.randn(5, 32, requires_grad=True), torch.randint(0, 4, (5, 2)), torch.rand(5, 2)
weights = torch.randn(4, 48, 32), torch.randn(4, 32, 24)
seen = set()
for name in ("up_kernel", "product_kernel", "combine_kernel", "gate_backward_kernel"):
    def seeing(kernel, name):
        class Seen:
            def __getitem__(self, grid):
                return lambda *args, WIDE, **more: (seen.add((name, WIDE)), kernel[grid](*args, WIDE=WIDE, **more))
        return Seen()
    setattr(kernels, name, seeing(getattr(kernels, name), name))

def found():
    seen.clear()
    out = expert_mlp(x, ids, routing, *weights)
    return out, *torch.autograd.grad(out.sum(), x)

narrow = found()
assert len(seen) == 4 and not any(wide for _, wide in seen), seen
with tried.wide_addresses():
    wide = found()
assert len(seen) == 4 and all(wide for _, wide in seen), seen
assert all(map(torch.equal, narrow, wide))
"""


@needs_triton
@pytest.mark.slow
def test_offsets_are_wide_where_they_must_be() -> None:
    run(CODE)
