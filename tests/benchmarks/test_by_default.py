"""The table of defaults: ours beside the best settings and each library, and the ratio that is judged."""

from __future__ import annotations

import argparse
import csv
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.caches import own_cache

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("by_default")


def kept_of(script, times):
    kept = script.Kept(argparse.Namespace(results=None, commit=""), "card", "work")
    for name, ms in times.items():
        kept.add("step", "shape", name, ms=ms, peak_mib=1024)
    return kept


def test_a_line_has_each_library_the_best_of_ours_and_what_is_missed(script) -> None:
    times = {"trl plain": [200.0] * 4, "trl liger": [150.0] * 4, "cut": [120.0] * 4, "cut, compiled": [100.0] * 4}
    cells = script.row(kept_of(script, {**times, "ours by default": [104.0] * 4}), 1000, ("cut", "cut, compiled"))
    by_name = dict(zip(("work", *script.COLUMNS, "best ratio", "library ratio"), cells, strict=True))
    assert len(cells) == len(["work", *script.COLUMNS.values(), *script.RATIOS])
    assert by_name["plain"] == "5,000 in 1.0"
    assert by_name["default"] == by_name["compiled by torch, liger"] == "-"
    assert by_name["best"] == "10,000 in 1.0 (cut, compiled)"
    assert by_name["best ratio"] == "1.040 [1.040, 1.040]"
    assert by_name["library ratio"] == "0.693 [0.693, 0.693] (liger)"
    slow = script.row(kept_of(script, {**times, "ours by default": [106.0] * 4}), 1000, ("cut", "cut, compiled"))
    assert slow[-2] == "1.060 [1.060, 1.060] MISSED"


def test_rows_are_of_ours_ours_by_default_and_each_library(script, tmp_path: Path) -> None:
    file = tmp_path / "results.csv"
    kept = script.Kept(argparse.Namespace(results=file, commit="abc"), "card", "work")
    times = {"trl plain": 200.0, "ours by default": 104.0, "cut": 120.0, "cut, compiled": 100.0}
    for name, ms in times.items():
        kept.add("step", "shape", name, ms=[ms], peak_mib=1024)
    kept.write(("cut, compiled", "cut", "cut, none"))
    with file.open(newline="") as lines:
        rows = {row["impl"]: row for row in csv.DictReader(lines)}
    assert {name: float(row["ms"]) for name, row in rows.items()} == {
        "trl plain": 200.0,
        "ours by default": 104.0,
        "cut": 120.0,
        "ours": 100.0,
    }
    assert {row["work"] for row in rows.values()} == {"by_default"}
    assert rows["ours"]["shape"] == "work: step, shape; settings: cut, compiled"
    assert rows["cut"]["shape"] == "work: step, shape"


def test_a_row_of_ours_is_read_as_the_arm_that_it_is_of(script) -> None:
    estimates = importlib.import_module("step_estimates")
    words = "8b-lora: step_8b_lora_sft, 4x2048; 20 rounds; / plain 0.524 [0.510, 0.540]"
    before = {"work": "by_default", "shape": words, "impl": "cut, compiled", "ms": "500", "device": "NVIDIA H200"}
    now = {**before, "shape": f"{words}{script.SETTINGS}cut, compiled", "impl": "ours"}
    assert estimates.step_of(now) == estimates.step_of(before) is not None


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_runs_without_a_card_and_names_what_is_not_installed(tmp_path: Path) -> None:
    told = [
        "--shape",
        "tiny",
        "--rounds",
        "3",
        "--tokens",
        "64",
        "--no-start",
        "--arms",
        "plain",
        "liger",
        "ours by default",
    ]
    done = subprocess.run(
        [sys.executable, FOLDER / "by_default.py", "8b-lora", "0.6b-dpo", *told],
        env={**os.environ, "WORKBENCH_CACHE": own_cache(tmp_path / "cache")}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sft liger: left out, " in done.stdout, "no kernels of a GPU without one, and no traceback for it"
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(("| 8b-lora, tiny", "| 0.6b-dpo, tiny"))]
    assert len(lines) == 4
