"""A worker that hangs is named in every window and list, and its stack can be asked for."""

from __future__ import annotations

import json
import signal

import pytest
from click.testing import CliRunner

from engine.errors import WorkbenchError
from engine.run import silence, stack
from engine.run.events import EventWriter
from engine.run.index import open_view, peek
from engine.run.listing import Listing
from engine.run.view import RunView
from tests.hung import in_c, put_back, steps_taken
from workbench.__main__ import cli


@pytest.fixture
def going(run):
    """A run whose worker lives and took a step each second, up to step 7 of 100; the clock of its events can be put back."""
    steps_taken(run)
    return run


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, ""),
        (45, "silent for 45 s"),
        (119, "silent for 119 s"),
        (120, "silent for 2:00"),
        (7300, "silent for 2:01:40"),
    ],
)
def test_silence_is_worded_once_for_all_windows(seconds, words):
    assert silence.describe(seconds) == words
    said = silence.advice("dates-0001", seconds)
    assert bool(said) == bool(words)
    if words:
        assert said.startswith(f"dates-0001 is {words}, longer than anything it does takes")
        assert said.endswith("`workbench stack dates-0001` shows where it is.")


def test_a_run_without_events_for_longer_than_its_steps_take_is_silent_and_has_no_time_left(going):
    put_back(going, 5)
    with open_view(going) as watch:
        assert watch.view.silent_seconds is None
        assert watch.view.eta_seconds is not None
    listed = Listing(going.path.parent)
    assert listed.refresh(listed.read()[0]).eta_seconds is not None
    put_back(going, 45)
    with open_view(going) as watch:
        watch.poll()
        assert watch.view.silent_seconds == 45
    assert peek(going).view.silent_seconds == 45
    assert listed.refresh(listed.read()[0]).eta_seconds is None


def test_a_step_at_which_the_run_measures_or_saves_is_given_the_time_that_takes():
    view = RunView(state="running", step=7, max_steps=100, pauses=[10], longest_gap=1.0)
    assert silence.silent_for(view, 45.0) == 45
    view.step = 10
    assert silence.silent_for(view, 300.0) is None, "the first evaluation may take minutes"
    assert silence.silent_for(view, 700.0) == 700
    view.longest_pause = 20.0
    assert silence.silent_for(view, 45.0) is None
    assert silence.silent_for(view, 70.0) == 70
    for begins in (RunView(state="starting", step=7, longest_gap=1.0), RunView(state="running", longest_gap=1.0)):
        assert silence.silent_for(begins, 300.0) is None, "loading and the first step may take minutes"
        assert silence.silent_for(begins, 700.0) == 700
    view.step, view.longest_gap = 11, 40.0
    assert silence.silent_for(view, 100.0) is None, "slow steps are no silence"
    for state in ("finished", "stopped", "failed", "lost", "queued"):
        view.state = state
        assert silence.silent_for(view, 1e6) is None


def test_logging_now_and_then_counts_evaluations_between_two_lines():
    view = RunView(state="running", step=20, max_steps=100, pauses=[25], every=10, longest_gap=1.0)
    assert view.pausing
    view.step = 30
    assert not view.pausing


def test_the_lists_and_the_watch_name_it(going):
    put_back(going, 45)
    told = CliRunner().invoke(cli, ["runs", "--runs", str(going.path.parent)])
    assert "silent for 45 s" in told.output
    assert f"`workbench stack {going.id}`" in told.output
    (entry,) = json.loads(CliRunner().invoke(cli, ["runs", "--runs", str(going.path.parent), "--json"]).output)
    assert entry["silent_seconds"] == 45
    found = json.loads(CliRunner().invoke(cli, ["watch", going.id, "--runs", str(going.path.parent), "--json"]).output)
    assert found["silent_seconds"] >= 45


def test_news_end_the_silence(going):
    put_back(going, 45)
    with open_view(going) as watch:
        watch.poll()
        assert watch.view.silent_seconds == 45
        with EventWriter(going, segment=0) as writer:
            writer.write("metrics", step=8, loss=0.5)
        watch.poll(1.0)
        assert watch.view.silent_seconds is None


@pytest.fixture
def hung(going):
    with in_c(going) as child:
        yield going, child


def test_the_stack_of_a_worker_that_hangs_in_c_is_shown_and_the_worker_lives_on(hung):
    run, child = hung
    for _ in range(2):
        told = CliRunner().invoke(cli, ["stack", run.id, "--runs", str(run.path.parent)])
        assert told.exit_code == 0, told.output
        assert told.output.count("in deep_inside") == 1
        assert f"process {child.pid}" in told.output
    assert child.poll() is None


def test_a_worker_that_is_stopped_by_a_signal_is_named_as_that(hung, monkeypatch):
    run, child = hung
    monkeypatch.setattr(stack, "PATIENCE", 0.3)
    child.send_signal(signal.SIGSTOP)
    with pytest.raises(WorkbenchError, match="stopped by a signal"):
        stack.ask(run)


def test_a_process_that_is_not_proven_to_be_the_worker_is_not_asked(going, monkeypatch):
    """What run.json names here is this very process, which carries no token of the run."""
    monkeypatch.setattr(stack, "PATIENCE", 0.3)
    with pytest.raises(WorkbenchError, match="not proven to be its worker"):
        stack.ask(going)
    going.update_json(state="finished")
    with pytest.raises(WorkbenchError, match="no worker at work"):
        stack.ask(going)
