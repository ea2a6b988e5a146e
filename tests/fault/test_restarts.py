"""`run.max_restarts`: a run whose worker dies goes on by itself, as if nothing had been, and not for ever."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from engine.run import checkpoint, control, restarts
from engine.run.index import open_view
from engine.run.store import ENDED, RunFolder
from engine.run.tail import Tail
from engine.run.view import RunView, fold
from workbench.cli.following import Follower, summary

Start = Callable[..., RunFolder]


def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def view_of(run: RunFolder) -> RunView:
    view, tail = RunView(), Tail(run.events)
    while events := tail.read():
        fold(view, events)
    return view


def kill_after(run: RunFolder, step: int, starts: int) -> None:
    """Kill the worker of this start once it is beyond this step."""
    until(lambda: len(view_of(run).restarts) == starts and run.state == "running" and view_of(run).step > step)
    who = run.worker()
    assert who is not None
    os.kill(who.pid, signal.SIGKILL)


def test_a_killed_worker_is_started_anew_and_the_run_is_the_one_that_was_never_killed(start: Start) -> None:
    whole = start(steps=160, save_steps=20)
    run = start(steps=160, save_steps=20, run={"max_restarts": 1})
    kill_after(run, 25, 0)
    kill_after(run, 60, 1)  # a new checkpoint lets the count begin anew
    watch = open_view(run)
    view = Follower(watch, quiet=True).until(lambda _: False)
    until(lambda: whole.state == "finished")
    assert (run.state, view.state, view.step) == ("finished", "finished", 160)
    assert view.latest["loss"] == view_of(whole).latest["loss"]
    assert view.series["loss"] == view_of(whole).series["loss"]
    assert [entry["message"].split(" ended by ")[1].split(" from ")[0] for entry in view.restarts] == [
        "SIGKILL. It is started again"
    ] * 2
    assert summary(watch)["restarts"] == 2
    assert view.cause == ""
    values = run.read_json()
    assert (values["cause"], values["state"]) == ("", "finished")


def test_it_is_not_tried_for_ever(start: Start) -> None:
    run = start(steps=160, save_steps=20, die=7, die_at=5, die_again=True, run={"max_restarts": 2})
    until(lambda: run.state in ENDED)
    view = view_of(run)
    assert (view.state, len(view.restarts)) == ("failed", 2)
    assert "exit code 7" in view.cause
    assert "(2 of 2 times without a new checkpoint)" in view.restarts[1]["message"]
    assert "the beginning, as there is no checkpoint yet" in view.restarts[0]["message"]


@pytest.mark.parametrize("settings", [{"run": {"max_restarts": 3}, "raise_at": 5}, {}])
def test_what_would_come_again_ends_the_run(start: Start, settings: dict[str, Any]) -> None:
    run = start(steps=5000, **settings)
    if not settings:
        kill_after(run, 3, 0)
    until(lambda: run.state in ENDED)
    assert (run.state, view_of(run).restarts) == ("failed", [])


def test_a_damaged_checkpoint_is_passed_over(start: Start) -> None:
    run = start(steps=5000, save_steps=20, run={"max_restarts": 1})
    until(lambda: len(view_of(run).committed) == 2)
    supervisor, worker = run.supervisor(), run.worker()
    assert supervisor is not None
    assert worker is not None
    for who in (supervisor, worker):
        os.kill(who.pid, signal.SIGSTOP)
        until(lambda who=who: psutil.Process(who.pid).status() == psutil.STATUS_STOPPED)  # type: ignore[misc]
    newest, _ = checkpoint.newest_valid(run)
    assert newest is not None
    (newest / "state.json").write_text("{")
    older, _ = checkpoint.newest_valid(run)
    assert older is not None
    os.kill(worker.pid, signal.SIGKILL)
    os.kill(supervisor.pid, signal.SIGCONT)
    until(lambda: view_of(run).restarts and view_of(run).resumed_from is not None)
    assert view_of(run).resumed_from == checkpoint.step_of(older)


def test_who_wants_it_to_end_is_heard_between_two_starts(start: Start) -> None:
    run = start(steps=5000, save_steps=20, die=7, die_at=5, die_again=True, run={"max_restarts": 5})
    until(lambda: len(view_of(run).restarts) == 2)
    assert restarts.PAUSE_SECONDS[1] > 2
    control.request(run, "stop", by="somebody")
    until(lambda: run.state in ENDED)
    view = view_of(run)
    assert (run.state, view.state) == ("stopped", "stopped")
    assert "before its worker was started again" in view.cause
    assert json.loads((run.path / "run.json").read_text())["state"] == "stopped"
