"""The kernel that decodes four bits inside of a product, which a benchmark times, gives the unpacked product's numbers."""

from __future__ import annotations

from tests.benchmarks.interpreted import needs_triton, run

CODE = """
import torch
import decoded_products as tried
from engine.kernels.experts.launch import planned
torch.manual_seed(0)
weight = torch.randn(3, 64, 96)
held = tried.packed_experts(weight)
unpacked = held.all_unpacked()
ids = torch.randint(0, 3, (5, 2))
for turned in (False, True):
    x = torch.randn(10, 64) if turned else torch.randn(5, 96)
    plan = planned(ids.reshape(-1, 1) if turned else ids, 3, 16)
    found = tried.decoded(x, held, plan, 16, 1 if turned else 2, turned, (32, 32, 4, 2))
    wanted = torch.stack([
        x[slot if turned else slot // 2] @ (unpacked[expert] if turned else unpacked[expert].T)
        for slot, expert in enumerate(ids.reshape(-1).tolist())
    ])
    assert torch.allclose(found, wanted, atol=1e-4), (found - wanted).abs().max()
"""


@needs_triton
def test_what_is_decoded_inside_is_the_unpacked_product() -> None:
    run(CODE)
