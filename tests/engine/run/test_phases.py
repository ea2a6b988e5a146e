"""The way to the first step: what is done and how long it took, what goes on, what is still to come."""

from __future__ import annotations

from typing import Any

import pytest

from engine.run.phases import before_first_step, reason
from engine.run.view import RunView, fold


def viewed(*events: dict[str, Any]) -> RunView:
    lines = [{"v": 1, "seq": seq, "rank": 0, "segment": 0, **event} for seq, event in enumerate(events)]
    view = RunView()
    fold(view, lines)
    return view


def phase(t: float, name: str) -> dict[str, Any]:
    return {"t": t, "kind": "phase", "name": name}


def test_each_phase_tells_its_seconds_and_what_comes_next_until_there_is_a_step() -> None:
    begun = [
        phase(100.0, "Reading the config"),
        phase(100.5, "Loading the libraries"),
        phase(104.0, "Preparing the data"),
    ]
    told = [(one.word, one.state, one.seconds) for one in before_first_step(viewed(*begun), now=106.0)]
    assert told == [
        ("config", "done", pytest.approx(0.5)),
        ("libraries", "done", pytest.approx(3.5)),
        ("rows", "now", pytest.approx(2.0)),
        ("model", "later", None),
        ("trainer", "later", None),
        ("first step", "later", None),
    ]
    # A clock that is behind makes no negative time, and the same phase named twice is one.
    twice = before_first_step(viewed(*begun, phase(105.0, "Preparing the data")), now=90.0)
    assert [one.seconds for one in twice if one.state == "now"] == [0.0]
    started = {"t": 107.0, "kind": "started", "method": "sft", "model": "m", "max_steps": 4}
    stepped = viewed(*begun, started, {"t": 108.0, "kind": "metrics", "step": 1, "loss": 2.0})
    assert before_first_step(stepped, now=109.0) == []
    assert [(one.word, one.state) for one in before_first_step(RunView())][:2] == [
        ("process", "now"),
        ("config", "later"),
    ]
    assert before_first_step(viewed(*begun, {"t": 108.0, "kind": "failed", "message": "no"}), now=109.0) == []


def test_compiling_between_stands_where_it_happens() -> None:
    begun = [phase(1.0, "Building the trainer"), phase(2.0, "Training"), phase(3.0, "Compiling layers: it is worth it")]
    told = [(one.word, one.state) for one in before_first_step(viewed(*begun), now=4.0)]
    assert told == [("trainer", "done"), ("compiling layers", "now"), ("first step", "later")]
    assert before_first_step(viewed(*begun), now=4.0)[0].seconds == 1.0
    assert reason(viewed(*begun)) == "it is worth it"
    after = viewed(*begun, phase(9.0, "Training"))
    told = [(one.word, one.state, one.seconds) for one in before_first_step(after, now=10.0)]
    assert told[1:] == [("compiling layers", "done", 6.0), ("first step", "now", 1.0)]
    assert reason(after) == ""
