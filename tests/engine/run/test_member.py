"""How long a node of a run waits for the first one, and what it tells that of its own ranks."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import pytest

from engine.errors import WorkbenchError
from engine.run import launch, member, nodes, spawn
from engine.run.devices import Choice
from engine.run.member import Member
from engine.run.nodes import FirstNode, Rendezvous


@pytest.fixture
def between_rounds(run, monkeypatch):
    """The second node of two, and the first, which has ended the round that the second came to and says no more."""
    monkeypatch.setattr(nodes, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(member, "LOOK_SECONDS", 0.02)
    meeting = Rendezvous(2, "127.0.0.1:1", "none", 0.3)
    run.update_json(rendezvous=meeting.as_json(), state="running")
    first, second = FirstNode(run, meeting), Member(run, 1)
    problems: list[WorkbenchError] = []

    def stay() -> None:
        try:
            second.stay()
        except WorkbenchError as problem:
            problems.append(problem)

    thread = threading.Thread(target=stay)
    thread.start()
    give_up = time.monotonic() + 30
    while not second.answered:
        assert time.monotonic() < give_up
        first.report(state="gathering", round="a round")
        time.sleep(0.02)
    first.report(state="ended")
    yield thread, problems
    run.update_json(state="failed")
    thread.join(10)


def test_it_stays_while_the_first_reads_its_checkpoint_and_pauses(run, between_rounds):
    thread, problems = between_rounds
    thread.join(0.8)
    assert thread.is_alive(), problems
    run.update_json(state="failed")
    thread.join(10)
    assert not thread.is_alive()
    assert problems == []


def test_it_does_not_stay_for_ever(run, monkeypatch, between_rounds):
    thread, problems = between_rounds
    monkeypatch.setattr(member, "BETWEEN_SECONDS", 0.0)
    thread.join(10)
    assert "has fallen silent" in str(problems[0])


AGENT = """
import os, subprocess, sys, time
rank = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], env={**os.environ, "RANK": "1"})
print(rank.pid, file=open(sys.argv[1], "w"), flush=True)
rank.wait()
time.sleep(1)
print(f"Root Cause (first observed failure):\\n  exitcode  : {rank.returncode} (pid: {rank.pid})", flush=True)
sys.exit(1)
"""


def test_a_rank_that_died_here_is_named_though_the_first_node_ended_the_round_before_torchrun_said_so(
    run, monkeypatch, tmp_path
):
    """The first node's rank loses its connection at once, and its torchrun may well be the first to leave."""
    pid = tmp_path / "pid"
    monkeypatch.setattr(spawn, "worker_argv", lambda *_, **__: [sys.executable, "-S", "-c", AGENT, str(pid)])
    meeting = Rendezvous(2, "127.0.0.1:1", "none", 30)
    run.update_json(rendezvous=meeting.as_json(), state="running", devices_wanted="auto")
    first, second = FirstNode(run, meeting), Member(run, 1)
    monkeypatch.setattr(launch, "choose_free", lambda *_: Choice((), 1))
    thread = threading.Thread(target=second.stay)
    thread.start()
    try:
        _until(lambda: first.report(state="gathering", round="one", endpoint="127.0.0.1:1") or second.answered)
        _until(lambda: first.report(state="go") or (pid.exists() and pid.read_text().strip()))
        rank = int(pid.read_text())
        time.sleep(0.7)  # it has looked for its ranks
        os.kill(rank, signal.SIGKILL)
        time.sleep(0.2)
        first.report(state="ended")
        _until(lambda: nodes.read_node(run, 1).get("state") == "ended")
    finally:
        run.update_json(state="failed")
        thread.join(20)
    said = nodes.read_node(run, 1)
    assert said["cause"] == "signal SIGKILL"
    assert said["message"].startswith("Rank 1 (node 1, ")
    assert f"process {rank}) was ended by SIGKILL" in said["message"]


def _until(hold: Callable[[], object]) -> None:
    give_up = time.monotonic() + 30
    while not hold():
        assert time.monotonic() < give_up
        time.sleep(0.02)
