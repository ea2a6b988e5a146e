"""What one rank's end or silence does to the others, and whose words explain the end."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from engine.run import peers as module
from engine.run.cause import Cause
from engine.run.devices import Choice
from engine.run.peers import Peers
from engine.run.spawn import TOKEN
from engine.run.worker_process import WorkerProcess

TOKEN_OF_RUN = "5e" * 16
WAITS = "import time; time.sleep(60)"
HANG = Cause("hang", "Rank 1 hangs.")


@pytest.fixture
def ranks(run, monkeypatch):
    """An agent and a rank of two, whose heartbeats show a hang."""
    monkeypatch.setattr(module, "Hang", lambda run, ranks: SimpleNamespace(poll=lambda: HANG))
    run.log.touch()
    environment = {**os.environ, TOKEN: TOKEN_OF_RUN}
    started = [
        subprocess.Popen([sys.executable, "-S", "-c", WAITS], env={**environment, **own}) for own in ({}, {"RANK": "1"})
    ]
    yield started
    for process in started:
        process.kill()
        process.wait()


def begun(run, agent, processes: int) -> tuple[Peers, WorkerProcess]:
    worker = WorkerProcess.started(run, agent, TOKEN_OF_RUN, processes, 0)
    peers = Peers(run)
    peers.begin(worker)
    return peers, worker


def test_ranks_that_hang_are_ended_and_that_is_the_cause(run, ranks):
    peers, worker = begun(run, ranks[0], 2)
    peers.watch(worker, ended=False, asked=False)
    assert [process.wait(10) for process in ranks] == [-9, -9]
    assert peers.explain(worker, -9) is HANG


@pytest.mark.parametrize(("processes", "ended", "asked"), [(1, False, False), (2, True, False), (2, False, True)])
def test_a_rank_alone_and_one_that_ends_anyway_are_left(run, ranks, processes, ended, asked):
    peers, worker = begun(run, ranks[0], processes)
    peers.watch(worker, ended=ended, asked=asked)
    assert (peers.hung, worker.exit_code()) == (None, None)
    assert ranks[1].poll() is None


def test_another_node_s_end_ends_the_ranks_here_and_is_told_in_its_words(run, ranks):
    peers, worker = begun(run, ranks[0], 1)
    theirs = Cause("cuda_oom", "node 1: the GPU ran out of memory.")
    peers.node = SimpleNamespace(beat=lambda: None, others_end=lambda: True, round_cause=lambda: theirs)
    peers.watch(worker, ended=True, asked=False)
    assert worker.exit_code() is None
    peers.watch(worker, ended=False, asked=False)
    assert [process.wait(10) for process in ranks] == [-9, -9]
    assert peers.explain(worker, -9) is theirs


def test_a_run_on_one_machine_waits_for_nobody(run):
    assert Peers(run).gather(Choice(("cpu",), 2), {}, pytest.fail, lambda: False) is None
