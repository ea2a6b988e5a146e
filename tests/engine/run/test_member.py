"""How long a node of a run waits for the first one, and whose end it tells."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from dataclasses import replace

import pytest

from engine.errors import WorkbenchError
from engine.run import member, nodes
from engine.run.member import Member
from engine.run.nodes import FirstNode, Rendezvous
from engine.run.process import identity
from engine.run.process_group import Family


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
        first.say(state="gathering", round="a round")
        time.sleep(0.02)
    first.say(state="ended")
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


@pytest.mark.parametrize("gone", [True, False], ids=["its own rank went first", "all its ranks live"])
def test_a_node_whose_rank_went_first_says_so_after_the_first_node_has_ended_the_round(run, monkeypatch, gone):
    """The first node's ranks may fall with it before its own torchrun has looked, which then is not told to end."""
    monkeypatch.setattr(member, "LOOK_SECONDS", 0.02)
    run.update_json(rendezvous=Rendezvous(2, "127.0.0.1:1", "none", 5).as_json())
    node = Member(run, 1)
    FirstNode(run, Rendezvous(2)).say(state="ended", round="a round")
    agent = subprocess.Popen(["sleep", "1"])
    who = identity(agent.pid)
    assert who is not None
    family = Family("", who, 1)
    family.ranks[1] = replace(who, start=who.start + 1) if gone else who
    assert node._watch(agent, family, 0, "a round") is not gone
    assert agent.returncode == (0 if gone else -signal.SIGTERM)
