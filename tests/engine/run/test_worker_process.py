"""Whose process a worker is: what may be signalled, what is adopted, and why it ended."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from engine.run import cause
from engine.run.lock import RunLock
from engine.run.process import Identity, identity
from engine.run.process_group import ProcessTree
from engine.run.spawn import TOKEN
from engine.run.worker_process import WorkerProcess

TOKEN_OF_RUN = "3f" * 16


@pytest.fixture
def child(run):
    """A process with the run's token, which run.json names as the worker."""
    environment = {**os.environ, TOKEN: TOKEN_OF_RUN}
    code = "import time; print(flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-S", "-c", code], env=environment, stdout=subprocess.PIPE)
    process.stdout.readline()  # while it is being started its environment cannot be read
    worker = WorkerProcess.started(run, process, TOKEN_OF_RUN, 1, 7)
    me = worker.who
    run.update_json(
        token=TOKEN_OF_RUN, log_from=7, worker_pid=me.pid, worker_start=me.start, boot_id=me.boot, host=me.host
    )
    yield process
    process.kill()
    process.communicate()


def test_a_child_is_the_worker_and_another_has_to_be_proven(run, child):
    mine = WorkerProcess.started(run, child, TOKEN_OF_RUN, 1, 0)
    adopted = WorkerProcess.adopted(run)
    assert adopted is not None
    assert (adopted.who, adopted.log_from, adopted.exit_code()) == (mine.who, 7, None)
    assert mine.may_be_signalled(leaving=False)
    with RunLock(run):  # a process without the token holds the run
        assert mine.may_be_signalled(leaving=False)
        assert not adopted.may_be_signalled(leaving=False)
    adopted.kill()
    assert child.wait(10) == -9
    assert not adopted.lives
    assert mine.exit_code() == -9


def test_a_process_that_does_not_carry_the_token_is_not_adopted(run, child):
    run.update_json(token="another")
    assert WorkerProcess.adopted(run) is None
    run.update_json(token=TOKEN_OF_RUN, worker_start=1)
    assert WorkerProcess.adopted(run) is None


def test_an_end_for_memory_is_told_by_what_the_kernel_counted_since_the_start(run, child, monkeypatch):
    run.log.touch()
    kills = iter([3, 3, 4])
    monkeypatch.setattr(cause, "oom_kills", lambda: next(kills))
    monkeypatch.setattr(cause, "kernel_ended", lambda process: False)
    worker = WorkerProcess.started(run, child, TOKEN_OF_RUN, 1, 0)
    assert worker.explain(-9).cause == "signal SIGKILL"
    assert worker.explain(-9).cause == "host memory"
    assert worker.explain(-11).cause == "signal SIGSEGV"


def test_of_ranks_that_are_gone_at_once_the_one_that_fell_by_itself_is_named(run):
    """torchrun saw the first one fail first, which had only lost the second."""
    me = identity(os.getpid())
    other = Identity(me.pid + 1, me.start, me.boot, me.host)
    family = ProcessTree("token", me, 2)
    family.ranks, family.lost_rank = {0: me, 1: other}, (0, me)
    lost = "Traceback (most recent call last):\nRuntimeError: Connection closed by peer [127.0.0.1]:19890.\n"
    fell = "Traceback (most recent call last):\nValueError: too small\n"
    run.log.write_text(f"{fell}{lost}Root Cause (first observed failure):\n  exitcode  : 1 (pid: {me.pid})\n")
    begins = f"2026-11-27 13:10:00 rank 1: process {other.pid}, local rank 1 on lab\n"
    for own, rank, error in ((fell, 1, "ValueError: too small"), (lost, 0, "RuntimeError: Connection closed by peer")):
        run.log_of(1).write_text(begins + own)
        found = WorkerProcess(run, me, family).explain(1)
        assert found.message.startswith(f"Rank {rank} (process ")
        assert error in found.message
        assert found.follows == (rank == 0)
