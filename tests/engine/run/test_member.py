"""How long a node of a run waits for the first one."""

from __future__ import annotations

import threading
import time

import pytest

from engine.errors import WorkbenchError
from engine.run import member, nodes
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
