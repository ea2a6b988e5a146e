"""The benchmark of a step on images runs without a card, and TRL and ours learn the same tokens of its rows."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.caches import own_cache

SCRIPT = Path(__file__).parents[2] / "benchmarks/vision_step.py"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_arm_begins_as_trls_own_trainer_does(tmp_path: Path) -> None:
    results = tmp_path / "results.csv"
    told = ["--arms", "default", "ours by default", "cut", "--rounds", "1", "--window", "1", "--tokens", "128"]
    done = subprocess.run(
        [sys.executable, SCRIPT, "--shape", "tiny", *told, "--seconds", "500", "--check", "--results", results],
        env={**os.environ, "WORKBENCH_CACHE": own_cache(tmp_path / "cache")},
        capture_output=True,
        text=True,
    )
    # An arm whose first loss or gradient norm is another than TRL's is left out, and the exit code says so.
    assert done.returncode == 0, done.stdout + done.stderr
    assert "MET" not in done.stdout
    rows = list(csv.DictReader(results.open()))
    assert [row["impl"] for row in rows] == ["trl default", "ours by default", "cut"]
    assert {row["work"] for row in rows} == {"step_vl_3b_lora, tiny"}
    assert all(float(row["ms"]) > 0 for row in rows)
