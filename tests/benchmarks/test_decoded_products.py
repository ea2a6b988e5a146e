"""The ways of a product with packed experts that a benchmark times: what it calls decoded is, and all give one product."""

from __future__ import annotations

import pytest

from tests.benchmarks.interpreted import needs_triton, run

CODE = """
import torch
import decoded_products as tried
from engine.kernels.experts import launch
from engine.kernels.experts.packed import PackedExperts
torch.manual_seed(0)
held = tried.held_in("mxfp4", torch.randn(3, 64, 96, dtype=torch.float16))
weight = held.all_unpacked()
ids = torch.randint(0, 3, (5, 2))
taken = []
operand = launch._operand
launch._operand = lambda some, *given: (taken.append(type(some)), operand(some, *given))[1]
for turned in (False, True):
    x = torch.randn(10, 64).half() if turned else torch.randn(5, 96).half()
    steps = tried.entrants(x, held, weight, ids, turned)
    found = {name: step() for name, step in steps.items()}
    assert taken == [PackedExperts, torch.Tensor, torch.Tensor], taken
    taken.clear()
    for name, out in found.items():
        assert torch.allclose(out, found["16 bits"], atol=1e-2), (name, (out - found["16 bits"]).abs().max())
"""


@needs_triton
@pytest.mark.slow
def test_what_is_decoded_inside_is_the_unpacked_product() -> None:
    run(CODE)
