"""The benchmark of whole steps runs without a card: each case with its own weights, under its own name."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.caches import own_cache

SCRIPT = Path(__file__).parents[2] / "benchmarks/whole_step.py"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_case_runs_and_no_figure_of_another_shape_takes_its_name(tmp_path: Path) -> None:
    results = tmp_path / "results.csv"
    told = ["--arms", "plain", "cut", "none", "--rounds", "1", "--tokens", "64", "--check", "--results", results]
    done = subprocess.run(
        [sys.executable, SCRIPT, "--shape", "tiny", "--seconds", "250", *told],
        env={**os.environ, "WORKBENCH_CACHE": own_cache(tmp_path / "cache")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "MET" not in done.stdout
    rows = list(csv.DictReader(results.open()))
    cases = ("step_8b_lora", "step_8b_lora_short", "step_06b_full")
    impls = ("trl plain", "cut", "none")
    assert [(row["work"], row["impl"]) for row in rows] == [(f"{case}, tiny", impl) for case in cases for impl in impls]
    assert {row["shape"].split(";")[0] for row in rows} == {"4x64", "1x64"}
