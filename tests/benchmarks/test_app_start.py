"""The scripts that time the app still open it, see what they wait for, and what it takes of a processor is held to a bound."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
MOST = 2.1
"""Times what a bare Textual app takes of a processor until it is painted: 1.65 when this was written, 2.3 when nobody had looked."""


@pytest.mark.alone
def test_a_config_is_opened_soon_and_the_first_key_arrives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    app_start = importlib.import_module("app_start")
    app_start.ours(str(tmp_path / "runs"))  # compiles what was never imported
    starts = [(app_start.ours(str(tmp_path / "runs")), app_start.bare()) for _ in range(3)]
    assert "demo.yaml" in (tmp_path / "state/workbench/recent.json").read_text(), (
        "it stands among a person's own configs"
    )
    assert all(0 < mine.seconds < 60 and mine.kept for mine, _ in starts)
    mine, bare = (min(start.processor for start in column) for column in zip(*starts, strict=True))
    assert math.isnan(mine) or mine < MOST * bare, (
        f"{1000 * mine:.0f} ms of a processor, {mine / bare:.2f} of a bare app"
    )


@pytest.mark.slow
def test_keys_are_timed_in_the_largest_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    assert len(importlib.import_module("key_to_paint").measure(3, False)) >= 3
