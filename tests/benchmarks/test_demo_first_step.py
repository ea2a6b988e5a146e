"""The script that times the demo's first step still launches it, with the worker that waits."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from engine.run.warm import SWITCH
from tests.caches import own_cache

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_a_worker_that_waited_imports_nothing_after_the_launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv(SWITCH, "1")
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    script = importlib.import_module("demo_first_step")
    script.launched(tmp_path, waiting=False)  # the rows are prepared once
    launch = script.launched(tmp_path, waiting=True)
    assert launch.imports < 0.1 < launch.seconds
    assert 0 < launch.processor < 2.5, "0.6 when this was written; 3.4 with the imports"
