"""What one test's libraries write into the environment does not reach the processes of the next, nor does what the tests'
own shell had them ignore reach any."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import signals
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


def test_what_a_background_job_ignores_is_heard_by_what_it_starts() -> None:
    """The tests in the background of a shell, or below nohup: they stay deaf themselves, and the commands they start do not."""
    script = (
        "import os, signal, subprocess, sys\n"
        "from tests.signals import IGNORED_IN_BACKGROUND, hear_in_children\n"
        "for number in IGNORED_IN_BACKGROUND: signal.signal(number, signal.SIG_IGN)\n"
        "hear_in_children()\n"
        "for number in IGNORED_IN_BACKGROUND: os.kill(os.getpid(), number)\n"
        "print(subprocess.run(['grep', 'SigIgn', '/proc/self/status'], capture_output=True, text=True).stdout)"
    )
    argv = [sys.executable, "-c", script]
    said = subprocess.run(argv, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=60, check=True)
    ignored = int(said.stdout.split()[1], 16)
    assert not [number for number in signals.IGNORED_IN_BACKGROUND if ignored >> (number - 1) & 1]
