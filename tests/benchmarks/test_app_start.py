"""The scripts that time the app still open it, and see what they wait for."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_a_config_is_opened_and_the_first_key_arrives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    seconds, kept = importlib.import_module("app_start").ours(str(tmp_path / "runs"))
    assert 0 < seconds < 60
    assert kept


@pytest.mark.slow
def test_keys_are_timed_in_the_largest_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    assert len(importlib.import_module("key_to_paint").measure(3, False)) >= 3
