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


def test_a_resumed_run_has_its_own_way_to_its_first_step() -> None:
    """Also before it says from which step it goes on: until then the steps are those of the start before."""
    before = [
        {"t": 1.0, "kind": "started", "max_steps": 9},
        {"t": 2.0, "kind": "metrics", "step": 5, "loss": 2.0},
        {"t": 3.0, "kind": "stopped", "step": 5},
    ]
    begun = [{**phase(10.0, "Loading the libraries"), "segment": 1}, {**phase(12.0, "Loading the model"), "segment": 1}]
    now = [one.word for one in before_first_step(viewed(*before, *begun), now=13.0) if one.state == "now"]
    assert now == ["model"]
    on = [{"t": 14.0, "kind": "started", "max_steps": 9, "resumed_from_step": 5, "segment": 1}]
    assert before_first_step(viewed(*before, *begun, *on), now=15.0)
    stepped = {"t": 16.0, "kind": "metrics", "step": 6, "loss": 2.0, "segment": 1}
    assert before_first_step(viewed(*before, *begun, *on, stepped), now=17.0) == []
