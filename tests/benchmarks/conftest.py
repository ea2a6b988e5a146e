"""The scripts of `benchmarks` import each other from their own folder, as they do where a person calls them."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
