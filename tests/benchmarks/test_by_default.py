"""The table of defaults: ours beside the best settings and each library, and the ratio that is judged."""

from __future__ import annotations

import argparse
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
