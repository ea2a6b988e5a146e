"""Shared test helpers: where the real public data lies, and an environment that keeps tests apart."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

NOBODY = 65534

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
