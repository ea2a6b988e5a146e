"""The benchmark of methods runs without a card: in each method every arm trains, and begins as the plain trainer does."""

from __future__ import annotations

import csv
import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from engine.config.method import METHODS
from tests.caches import own_cache

SCRIPT = Path(__file__).parents[2] / "benchmarks/gpu_methods.py"
ARMS = ("plain", "ours", "cut", "none")
ALONE = ("ppo", "distill")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("weights", [[], ["--full"]], ids=["lora", "full"])
@pytest.mark.parametrize("method", METHODS)
def test_ours_and_the_plain_trainer_have_one_first_loss_and_gradient(
    method: str, weights: list[str], tmp_path: Path
) -> None:
    results = tmp_path / "results.csv"
    told = ["--methods", method, "--arms", *ARMS, "--rounds", "1", "--tokens", "64", "--check", "--results", results]
    done = subprocess.run(
        [sys.executable, SCRIPT, "--shape", "tiny", "--seconds", "1500", *weights, *told],
        env={**os.environ, "WORKBENCH_CACHE": own_cache(tmp_path / "cache")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    left_out = "plain: left out, " in done.stdout
    assert left_out == (method in ALONE) or method == "embedding"  # whose library need not be here
    impls = [row["impl"] for row in csv.DictReader(results.read_text("utf-8").splitlines())]
    libraries = {"prm": "transformers", "embedding": "sentence-transformers"}
    assert impls == ([] if left_out else [f"{libraries.get(method, 'trl')} plain"]) + ["ours", "cut", "none"]


def test_what_a_library_patches_is_in_force_in_its_own_turns_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    module = ModuleType("modeling")
    module.norm = "plain"  # type: ignore[attr-defined]
    patched = importlib.import_module("_turns").Patched(module)
    with patched:
        module.norm, module.added = "liger", "new"  # type: ignore[attr-defined]
    assert module.norm == "plain"
    assert not hasattr(module, "added")
    with patched:
        assert (module.norm, module.added) == ("liger", "new")
    assert module.norm == "plain"
    assert not hasattr(module, "added")
