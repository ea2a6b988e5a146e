"""The built-in demo through the product's own worker: it learns the rule and not the rows."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "benchmarks/demo_accuracy.py"


def exact(folder: Path, seed: int, *settings: str) -> float:
    """The share of the thousand held-out days that one run of the demo answers word for word."""
    results = folder / "results.csv"
    command = [sys.executable, str(BENCH), "--seeds", str(seed), "--runs", str(folder), "--results", str(results)]
    done = subprocess.run([*command, *settings], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (row,) = csv.DictReader(results.open())
    found = re.search(r"exact=([\d.]+)", row["shape"])
    assert found
    return float(found[1])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_demo_answers_nineteen_of_twenty_days_that_it_never_saw(tmp_path: Path) -> None:
    """How many seconds that takes is `benchmarks/demo_accuracy.py --check`, on a machine that does nothing else."""
    assert exact(tmp_path, 1) >= 0.95
