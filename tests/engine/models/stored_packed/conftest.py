"""The built-in model in 16 bits, from which packed bases are made."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.builtin import tiny


@pytest.fixture(scope="module")
def plain() -> Path:
    return tiny.folder()
