"""Every kernel compiles for the cards of these years, without one of them, and tiles are pruned by what they really take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from engine.kernels.gated import BACKWARD as GATED_BACKWARD
from engine.kernels.gated import FORWARD as GATED_FORWARD
from engine.kernels.gated_sums import BACKWARD as SUMS_BACKWARD
from engine.kernels.gated_sums import FORWARD as SUMS_FORWARD
from engine.kernels.linear_logp.tiles import CROWDED_ROW_TILES, CROWDING, GRADIENT_TILES, ROW_TILES
from engine.kernels.logp_entropy.launch import BACKWARD, FORWARD
from engine.kernels.norm_rope import BACKWARD as ROPE_BACKWARD
from engine.kernels.norm_rope import FORWARD as ROPE_FORWARD
from engine.kernels.rope import TILES as ROTATION

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
]
SCRIPT = Path(__file__).parent / "compile_for_a_card.py"
SUMS = "ROWS", "COLUMNS", "PIECES", None, "num_warps", "STAGES", None, None
"""None: a number of the tile that the compiler is not told."""
KERNELS = {
    "row_scores_kernel": (ROW_TILES, ("LANES", "RUN", "num_warps")),
    "slice_scores_kernel": (ROW_TILES, ("LANES", "RUN", "num_warps")),
    "scores_gradient_kernel": (GRADIENT_TILES, ("BLOCK_V", "num_warps")),
    "logp_entropy_fwd_kernel": (FORWARD, ("LANES", "RUN", "num_warps")),
    "logp_entropy_bwd_kernel": (BACKWARD, ("BLOCK_V", "num_warps")),
    "norm_rope_fwd_kernel": (ROPE_FORWARD, ("BLOCK_HQ", "num_warps")),
    "norm_rope_bwd_kernel": (ROPE_BACKWARD, ("BLOCK_HQ", "num_warps")),
    "rope_kernel": (ROTATION, ("BLOCK_HQ", "num_warps")),
    "gated_fwd_kernel": (GATED_FORWARD, ("BLOCK", "num_warps")),
    "gated_bwd_kernel": (GATED_BACKWARD, ("BLOCK", "num_warps")),
    "gated_sums_fwd_kernel": (SUMS_FORWARD, SUMS),
    "gated_sums_bwd_kernel": (SUMS_BACKWARD, SUMS),
}

EXPERTS = {
    "count_kernel", "plan_kernel", "place_kernel", "inner_kernel", "up_kernel", "product_kernel", "gram_kernel", "unpack_kernel",
    "unpack_int8_kernel", "unpack_fp8_kernel", "unpack_groups_kernel", "gate_backward_kernel", "combine_kernel",
}  # fmt: skip


def built(*arguments: str) -> list[dict]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("capability", ["80", "89", "100"])
def test_every_kernel_compiles_for_an_a100_an_l40_and_a_b200(capability):
    found = built(capability, "by hand")
    assert {each["kernel"] for each in found} == {
        *KERNELS,
        *EXPERTS,
        "rounded_rows_kernel",
        "transpose_kernel",
        "gated_sums_end_kernel",
    }


@pytest.mark.timeout(3000)
def test_on_an_h100_tiles_take_no_more_registers_than_they_are_pruned_by():
    found = built("90")
    assert len(found) > 50
    assert any("WIDE" in each["flags"] for each in found)
    for each in found:
        if each["kernel"] in EXPERTS:
            assert each["stack"] <= 64, each
            continue
        if each["kernel"] not in KERNELS or "WIDE" in each["flags"]:
            assert each["stack"] == 0, each
            continue
        tiles, names = KERNELS[each["kernel"]]
        if set(CROWDING) & set(each["flags"]) and tiles is ROW_TILES:
            tiles = CROWDED_ROW_TILES
        costs = [
            tiles.cost(tile)
            for tile in tiles.candidates
            if all(name is None or each[name] == value for name, value in zip(names, tile, strict=True))
        ]
        assert costs, each
        assert each["reg"] <= max(cost.registers for cost in costs) + 8, each
        assert each["shared"] <= max(48 << 10, *(cost.shared_bytes for cost in costs)), each
        # Where registers are shared out a few bytes may have to wait in memory.
        assert each["stack"] <= 64 * ("maxnreg" in each) or tiles is CROWDED_ROW_TILES, each
