"""The benchmark of the recipes of mixtures has their published shapes, and runs each without a card."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.caches import own_cache
from tests.engine.planning.test_recipes_of_mixtures import SHAPES

SCRIPT = Path(__file__).parents[2] / "benchmarks/mixture_recipes.py"


def test_its_shapes_are_those_whose_estimate_the_recipes_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    from mixture_recipes import RECIPES, TINY

    assert RECIPES.keys() == TINY.keys()
    for name, (_, _, shape) in RECIPES.items():
        published = {key: value for key, value in SHAPES[name][0].items() if key != "model_type"}
        assert published.items() <= shape.items()
        assert TINY[name].keys() <= shape.keys()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_recipe_takes_its_steps_on_a_small_model(tmp_path: Path) -> None:
    results = tmp_path / "results.csv"
    told = ["--tiny", "--tokens", "64", "--rounds", "1", "--seconds", "800", "--arms", "ours", "--check"]
    done = subprocess.run(
        [sys.executable, SCRIPT, *told, "--results", results],
        env={**os.environ, "WORKBENCH_CACHE": own_cache(tmp_path / "cache")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "base in nf4" in done.stdout
    assert "base in nvfp4" in done.stdout
    names = [row["work"] for row in csv.DictReader(results.open())]
    assert names == [f"recipe {name}, tiny" for name in ("olmoe", "mixtral", "qwen3.5-35b-a3b", "moonlight-16b-a3b")]
