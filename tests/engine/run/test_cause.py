"""What is told of a worker's end: its own lines only, without the noise of libraries."""

from __future__ import annotations

import os

import pytest

from engine.run import cause
from engine.run.cause import explain
from engine.run.process import Identity, host
from engine.run.process_group import ProcessTree

EARLIER = """Traceback (most recent call last):
  File "events.py", line 177, in _append
engine.errors.WorkbenchError: dates-0001: the disk is full: No space left on device
"""
IMPORTS = """Failed to load /env/site-packages/torchao/_C_mxfp8.so: Could not load this library
W1121 19:25:59.030000 24815 /env/torch/utils/_pytree.py:630] <enum 'KernelPreference'> is an Enum subclass
Failed to load CPU gemm_4bit_forward from kernels-community: No module named 'kernels'.
Loading weights:   0%|          | 0/46 [00:00<?, ?it/s]\rLoading weights: 100%|##########| 46/46 [00:00<00:00, 25581.81it/s]
"""


@pytest.fixture
def taken_up_again(tmp_path):
    """A log that holds the end of an earlier worker; and where the next one began to write."""
    log = tmp_path / "worker.log"
    log.write_text(EARLIER + IMPORTS, "utf-8")
    return log, len(EARLIER)


def test_a_worker_that_is_killed_is_not_told_with_the_lines_of_the_one_before_it(taken_up_again):
    log, log_from = taken_up_again
    found = explain(-9, log, log_from=log_from)
    assert (found.message, found.lines) == ("The worker was ended by SIGKILL.", ())


def test_the_full_disk_of_an_earlier_worker_is_not_the_cause_of_this_end(taken_up_again):
    log, log_from = taken_up_again
    assert explain(1, log, log_from=log_from).cause == "exit 1"
    assert explain(1, log).cause == "disk full"  # read from the beginning, it would be


def test_a_quota_a_limit_and_a_failing_disk_are_not_called_full(tmp_path):
    log = tmp_path / "worker.log"
    for number, word in ((122, "disk quota"), (27, "file size limit"), (5, "disk error")):
        log.write_text(f"Traceback (most recent call last):\nOSError: [Errno {number}] {os.strerror(number)}\n")
        assert explain(1, log).cause == word


def test_a_rank_is_told_in_words_of_its_own_and_not_of_who_fell_after_it(tmp_path):
    shared, own = tmp_path / "worker.log", tmp_path / "rank-1.log"
    fell = "Traceback (most recent call last):\ntorch.OutOfMemoryError: CUDA out of memory.\n"
    lost = "Traceback (most recent call last):\nRuntimeError: Connection closed by peer [127.0.0.1]:19890.\n"
    shared.write_text(EARLIER + fell + lost)
    before = f"2026-11-27 13:00:00 rank 1: process 76, local rank 1 on lab\n{EARLIER}"
    begins = "2026-11-27 13:10:00 rank 1: process 77, local rank 1 on lab\n"
    own.write_text(before + begins + fell)
    log, start = cause.log_of_rank(shared, len(EARLIER), own, 77)
    found = explain(1, log, log_from=start, who="Rank 1")
    assert (found.cause, found.message[:27]) == ("GPU memory", "Rank 1 ran out of GPU memor")
    assert found.lines == tuple(fell.splitlines())
    own.write_text(
        before + begins + fell.replace("torch.OutOfMemoryError", "ValueError").replace("CUDA out of memory", "odd")
    )
    found = explain(1, own, log_from=cause.log_of_rank(shared, len(EARLIER), own, 77)[1])
    assert (found.cause, found.follows) == ("exit 1", False), "no other node is asked why"
    assert not cause.passes({"cause": found.cause, "message": found.message, "lines": found.lines})
    assert cause.log_of_rank(shared, 5, own, 76) == (shared, 5), "what an earlier start said is of no use"
    own.write_text(before + begins + "step 3\n")
    assert cause.log_of_rank(shared, 5, own, 77) == (shared, 5), "a crash is told in the shared log alone"
    assert cause.log_of_rank(shared, 5, tmp_path / "rank-2.log", 77) == (shared, 5)
    assert explain(1, shared, log_from=len(EARLIER)).follows


def test_a_crash_is_told_by_where_its_thread_was_and_not_by_who_fell_after_it(taken_up_again):
    log, log_from = taken_up_again
    crash = 'Fatal Python error: Segmentation fault\n\nThread 0x01 (most recent call first):\n  File "wait.py", line 1 in wait\n\n'
    where = 'Current thread 0x02 (most recent call first):\n  File "step.py", line 7 in step\n'
    with log.open("a", encoding="utf-8") as file:
        file.write(f"{crash}{where}\nTraceback (most recent call last):\nRuntimeError: Connection closed by peer\n")
    found = explain(-11, log, log_from=log_from, who="Rank 1")
    assert found.message == "Rank 1 was ended by SIGSEGV."
    assert found.lines == ("Fatal Python error: Segmentation fault", *where.splitlines())


def test_an_own_traceback_is_told_whole(taken_up_again):
    log, log_from = taken_up_again
    with log.open("a", encoding="utf-8") as file:
        file.write('Traceback (most recent call last):\n  File "a.py", line 1\nValueError: too small\n')
    found = explain(1, log, log_from=log_from)
    assert found.lines[0].startswith("Traceback")
    assert len(found.lines) == 3
    assert found.message == "The worker ended with exit code 1: ValueError: too small"


def test_what_torchrun_said_of_the_ranks_of_an_earlier_start_is_not_believed(tmp_path):
    log = tmp_path / "worker.log"
    said = "W1123 torch/distributed/elastic: Sending process 12 closing signal SIGTERM\n"
    report = "  exitcode  : 1 (local_rank: 1)\n  (pid: 34)\n"
    log.write_text(said + report)
    assert cause.agent_saw_failure(log)
    before = log.stat().st_size
    log.write_text(said + report + "Training\n")
    assert not cause.agent_saw_failure(log, before)
    assert cause.failed_ranks(log, before) == {}
    log.write_text(said + report + "Training\n" + said)
    assert cause.agent_saw_failure(log, before)


REPORT = """torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Failures:
[1]:
  time      : 2026-11-26_23:51:18
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 2751)
  error_file: <N/A>
Root Cause (first observed failure):
[0]:
  time      : 2026-11-26_23:51:16
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 2752)  (SIGKILL)
"""


def test_of_ranks_that_are_gone_at_once_the_one_that_was_killed_is_named(tmp_path):
    """Rank 0 waited for a message of rank 1: both are gone before anybody looks, and torchrun has none to close."""
    own = "Traceback (most recent call last):\nRuntimeError: Read error: Connection reset by peer\n"
    (tmp_path / "worker.log").write_text(f"{own}Traceback (most recent call last):\n    main()\n{REPORT}")
    assert explain(1, tmp_path / "worker.log").lines == tuple(own.splitlines()), "torchrun's own says less"
    failed = cause.failed_ranks(tmp_path / "worker.log")
    assert list(failed.items()) == [(2752, -9), (2751, 1)]
    gone = [Identity(pid, 1, "another boot", host()) for pid in (2751, 2752)]
    family = ProcessTree("token", gone[0], 2)
    family.ranks = dict(enumerate(gone))
    assert family.poll(lambda: False) is None
    family.choose_lost_rank(failed)
    assert family.lost_rank == (1, gone[1])
    family.choose_lost_rank({2751: -9, 2752: 1}, said=True)
    assert family.lost_rank == (0, gone[0])
    family.choose_lost_rank({2752: 1, 2751: 1}, said=True)
    assert family.lost_rank == (0, gone[0]), "an exception of all of them is told in the words of the first rank"
