"""Shared test helpers: where the real public data lies, an environment that keeps tests apart, and no run left behind."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

NOBODY = 65534
MARK = f"WORKBENCH_TESTS_{uuid.uuid4().hex[:8]}"
"""Stands in the environment of every process that these tests start, also of those that outlive their parent."""

os.environ[MARK] = "1"
# The tests start hundreds of processes, and each would compile the whole source anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real public data named by WORKBENCH_TEST_DATA; tests that need it skip without it."""
    folder = os.environ.get("WORKBENCH_TEST_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("WORKBENCH_TEST_DATA names no folder of test data")
    return Path(folder)


@pytest.fixture
def own_folder() -> Iterator[Path]:
    """A folder of a user without privileges, whose rights this process has meanwhile: root may read and write all."""
    with tempfile.TemporaryDirectory() as name:
        if root := os.geteuid() == 0:
            os.chown(name, NOBODY, -1)
            os.setresuid(NOBODY, NOBODY, 0)
        try:
            yield Path(name)
        finally:
            if root:
                os.setresuid(0, 0, 0)


@pytest.fixture(scope="module", autouse=True)
def _nothing_runs_on() -> Iterator[None]:
    """A run outlives its window by design; one that outlives its test slows down all that come after it."""
    yield
    _, left = psutil.wait_procs([each for each in psutil.process_iter() if _is_orphan(each)], timeout=20)
    told = []
    for process in left:
        with contextlib.suppress(psutil.Error):
            told.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
            process.kill()
    assert not told, f"still running 20 seconds after the last test of this file, now killed: {told}"


def _is_orphan(process: psutil.Process) -> bool:
    """Whether these tests started it and it belongs to none of their processes any more."""
    try:
        return MARK in process.environ() and os.getpid() not in [process.pid, *(each.pid for each in process.parents())]
    except psutil.Error:
        return False
