"""The kernel that decodes four bits inside of a product, which a benchmark times, gives the unpacked product's numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
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


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_what_is_decoded_inside_is_the_unpacked_product() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{FOLDER}{os.pathsep}{FOLDER.parent}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
