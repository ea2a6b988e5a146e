from __future__ import annotations

from pathlib import Path

import pytest

from engine.run import store
from engine.run.store import RunFolder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return store.create(tmp_path / "runs", "version: 1\n", {"name": "Dates", "method": "sft", "model": "builtin/tiny"})
