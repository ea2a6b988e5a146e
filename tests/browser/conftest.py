"""One JupyterLab for all browser tests, a Chromium a file; each test has a notebook and a tab of its own.

Playwright's event loop counts as running for as long as it is open, and no other asynchronous test can run meanwhile:
so Chromium ends with its file.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import lab as browsing


@pytest.fixture(scope="package")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browsing.Lab]:
    if browsing.missing():
        pytest.skip(browsing.missing())
    with browsing.serve(tmp_path_factory.mktemp("lab")) as served:
        yield served


@pytest.fixture(scope="module")
def chromium(lab: browsing.Lab) -> Iterator[Any]:
    with browsing.browser() as opened:
        yield opened
    browsing.no_loop_is_left()
