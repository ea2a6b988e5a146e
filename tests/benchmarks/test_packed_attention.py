"""The benchmark of packed attention runs without a card, and reports what keeps documents apart."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks/packed_attention.py"


@pytest.mark.slow
def test_what_gives_each_documents_own_numbers_is_reported(tmp_path: Path) -> None:
    results = tmp_path / "results.csv"
    done = subprocess.run(
        [sys.executable, SCRIPT, "--shape", "tiny", "--results", results, "--commit", "abc"],
        env=dict(os.environ),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "DIFFERS" not in done.stdout
    with results.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["work"] for row in rows} == {"packed_attention"}
    assert "sdpa, mask of all pairs" in {row["impl"] for row in rows}
    assert all(float(row["ms"]) > 0 for row in rows)
