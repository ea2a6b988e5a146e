"""One JupyterLab, one Chromium and one tab of it for all browser tests; each test has a notebook of its own.

Playwright's event loop counts as running for as long as it is open, and no other asynchronous test can run meanwhile:
so Chromium ends with the last of them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import lab as browsing

HERE = Path(__file__).parent
OPEN = contextlib.ExitStack()
WINDOWS: list[browsing.Window] = []


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browsing.Lab]:
    if browsing.missing():
        pytest.skip(browsing.missing())
    with browsing.serve(tmp_path_factory.mktemp("lab"), lean=True) as served:
        yield served


@pytest.fixture
def chromium(lab: browsing.Lab) -> browsing.Window:
    if not WINDOWS:
        WINDOWS.append(browsing.Window(OPEN.enter_context(browsing.browser()), lab))
    return WINDOWS[0]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Generator[None]:
    yield
    if nextitem is None or HERE not in nextitem.path.parents:
        WINDOWS.clear()
        OPEN.close()
        browsing.no_loop_is_left()
