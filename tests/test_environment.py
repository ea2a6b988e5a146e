"""What one test's libraries write into the environment does not reach the processes of the next."""

from __future__ import annotations

import os
import sys

import pytest

from tests.prestarted import prestarted

WRITTEN = {"KMP_INIT_AT_FORK": "FALSE", "CUDA_LAUNCH_BLOCKING": "1"}


def test_a_library_writes_what_others_read_at_import() -> None:
    os.environ.update(WRITTEN)
    assert prestarted.at_import(dict(os.environ)).items() >= WRITTEN.items()


def test_it_is_gone_with_its_test() -> None:
    assert not WRITTEN.keys() & os.environ.keys()


def test_a_process_of_tests_side_by_side_was_forked_from_one_that_has_torch(pytestconfig: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ or "not gpu" not in pytestconfig.option.markexpr:
        pytest.skip("needs tests side by side, none of them of a card")
    assert sys.orig_argv[1:] == ["-u", "-c", prestarted.SIDE_BY_SIDE]
    assert os.getpgid(int(os.environ[prestarted.ASKER])) == os.getpgrp()
