"""One JupyterLab and one Chromium for all browser tests; each test has a notebook and a tab of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import lab as browsing


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browsing.Lab]:
    if browsing.missing():
        pytest.skip(browsing.missing())
    with browsing.serve(tmp_path_factory.mktemp("lab")) as served:
        yield served


@pytest.fixture(scope="session")
def chromium(lab: browsing.Lab) -> Iterator[Any]:
    with browsing.browser() as opened:
        yield opened
