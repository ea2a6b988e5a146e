"""The worker's lock: one owner, gone with it, and a heartbeat where the kernel's locks do not hold."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from engine.errors import RunBusy
from engine.run import lock
from engine.run.launch import locks_hold
from engine.run.lock import RunLock, is_held

HOLD = """
import os, sys, time
from engine.errors import RunBusy
from engine.run.lock import RunLock
from engine.run.store import RunFolder
try:
    held = RunLock(RunFolder(sys.argv[1])).acquire(settle=0.5)
except RunBusy as problem:
    print("busy", problem.message, flush=True)
    sys.exit(3)
if len(sys.argv) > 2 and sys.argv[2] == "spawn":
    import subprocess
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"], stdout=subprocess.DEVNULL)
print("held", held.how, flush=True)
time.sleep(30)
"""
STRACE = shutil.which("strace")


def hold(run, *extra, inject=None):
    """A process that holds the lock; with `inject` strace makes every flock of it fail or lie."""
    argv = [sys.executable, "-c", HOLD, str(run.path), *extra]
    if inject:
        argv = [STRACE, "-f", "-qq", "-o", "/dev/null", "-e", "trace=flock", "-e", f"inject=flock:{inject}", *argv]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True)
    return process, process.stdout.readline()


def end(*processes):
    for process in processes:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_one_owner_at_a_time_and_free_the_moment_it_dies(run):
    process, said = hold(run, "spawn")
    try:
        assert said == "held flock\n"
        assert is_held(run)
        with pytest.raises(RunBusy, match=f"is held by process {process.pid}"):
            RunLock(run).acquire()
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert not is_held(run)
        RunLock(run).acquire().release()
    finally:
        end(process)


def test_release_frees_it(run):
    with RunLock(run):
        assert is_held(run)
    assert not is_held(run)


@pytest.mark.skipif(STRACE is None, reason="strace is not installed")
@pytest.mark.parametrize("inject", ["error=ENOLCK", "retval=0"])
def test_where_locks_fail_or_lie_the_owner_record_keeps_a_second_one_out(run, inject):
    first, said = hold(run, inject=inject)
    try:
        assert said == ("held heartbeat\n" if "ENOLCK" in inject else "held flock\n")
        second, said = hold(run, inject=inject)
        end(second)
        assert said.startswith("busy run dates-0001 is held by process")
    finally:
        end(first)
    third, said = hold(run, inject=inject)
    end(third)
    assert said.startswith("held"), "a dead owner's record must not keep others out"


@pytest.mark.skipif(STRACE is None, reason="strace is not installed")
def test_two_at_the_same_moment_without_locks_end_with_one_owner(run):
    started = []
    argv = [STRACE, "-f", "-qq", "-o", "/dev/null", "-e", "trace=flock", "-e", "inject=flock:error=ENOLCK"]
    for _ in range(3):
        started.append(
            subprocess.Popen(
                [*argv, sys.executable, "-c", HOLD, str(run.path)],
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
    said = [process.stdout.readline().split()[0] for process in started]
    end(*started)
    assert said.count("held") == 1


def test_an_owner_on_another_host_counts_while_its_heart_beats(run):
    record = {"pid": 1, "start": 1, "boot": "other", "host": "other-machine", "how": "heartbeat", "token": "x"}
    run.lock.write_text(json.dumps(record))
    with pytest.raises(RunBusy, match="on other-machine"):
        RunLock(run).acquire()
    long_ago = time.time() - 2 * lock.STALE_SECONDS
    os.utime(run.lock, (long_ago, long_ago))
    RunLock(run).acquire().release()


@pytest.mark.parametrize("junk", [b"", b"{", b"\xff" * 100, b"[]", b'{"pid": -1}', b'{"pid": "1", "start": null}'])
def test_a_damaged_lock_file_is_no_owner(run, junk):
    run.lock.write_bytes(junk)
    RunLock(run).acquire().release()


def test_a_process_with_the_same_number_but_another_start_is_not_the_owner(run):
    me = {
        "pid": os.getppid(),
        "start": 12345,
        "boot": lock.identity().boot,
        "host": lock.identity().host,
        "how": "flock",
    }
    run.lock.write_text(json.dumps(me))
    assert not is_held(run)


def test_a_heartbeat_counts_from_another_container_of_this_machine_and_name(run):
    me = lock.identity().as_json()
    there = {**me, "boot": f"{me['boot']} pid:[1]", "how": "heartbeat", "token": "x"}
    run.lock.write_text(json.dumps(there))
    assert is_held(run)
    long_ago = time.time() - 2 * lock.STALE_SECONDS
    os.utime(run.lock, (long_ago, long_ago))
    assert not is_held(run)


def test_doctor_can_tell_whether_locks_hold_here(tmp_path):
    holds, words = locks_hold(tmp_path)
    assert holds, words
    assert list(tmp_path.iterdir()) == []


def test_a_record_that_was_lost_does_not_open_a_lock_that_the_kernel_holds(run):
    process, said = hold(run)
    try:
        assert said.startswith("held flock")
        run.lock.write_bytes(b"")
        with pytest.raises(RunBusy):
            RunLock(run).acquire(settle=0.1)
    finally:
        process.kill()
        process.wait()
