"""Numbers that are written a moment later: in order, complete at the end, and never in front of what was promised."""

from __future__ import annotations

import json
import threading
import time

import pytest

from engine.errors import WorkbenchError
from engine.run.async_writer import LATE_SECONDS, AsyncWriter


def lines(run):
    return [json.loads(line) for line in run.events.read_text().splitlines()]


def until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_late_event_is_made_on_another_thread_and_there_within_a_moment(run):
    threads = []

    def make():
        threads.append(threading.current_thread())
        return {"step": 1, "loss": 2.5}

    with AsyncWriter(run) as writer:
        writer.defer("metrics", make)
        until(lambda: run.events.read_bytes().endswith(b"\n"))
        assert threads != [threading.current_thread()]
    (event,) = lines(run)
    assert (event["kind"], event["seq"], event["step"], event["loss"]) == ("metrics", 0, 1, 2.5)


def test_an_event_carries_the_time_it_was_asked_for_not_the_time_it_was_made(run):
    with AsyncWriter(run) as writer:
        before = time.time()
        writer.defer("metrics", lambda: {"step": 1})
        asked = time.time()
        time.sleep(4 * LATE_SECONDS)
        writer.write("phase", name="end")
    metrics, end = lines(run)
    tick = 0.005  # times are written in thousandths of a second
    assert before - tick <= metrics["t"] <= asked + tick
    assert end["t"] - metrics["t"] >= 4 * LATE_SECONDS - tick


def test_what_is_written_at_once_comes_after_all_that_was_put_off_before(run):
    with AsyncWriter(run) as writer:
        for step in range(50):
            writer.defer("metrics", lambda step=step: {"step": step} if step % 10 else None)
        writer.write("checkpoint", step=49, path="checkpoint-49", state="committed")
        assert lines(run)[-1]["kind"] == "checkpoint"
        writer.defer("metrics", lambda: {"step": 50, "loss": float("nan")})
    found = lines(run)
    assert [event["seq"] for event in found] == list(range(len(found)))
    assert [event["step"] for event in found if event["kind"] == "metrics"] == [
        s for s in range(51) if s % 10 or s == 50
    ]
    assert (found[-1]["kind"], found[-1]["what"]) == ("diverged", "loss")


def test_a_problem_of_the_thread_ends_the_training_and_the_last_word_is_still_said(run):
    def broken():
        raise WorkbenchError("the disk is full")

    with AsyncWriter(run) as writer:
        writer.defer("batch", broken)
        writer.defer("metrics", lambda: {"step": 1})
        until(lambda: writer._problem is not None)
        with pytest.raises(WorkbenchError, match="the disk is full"):
            writer.defer("metrics", lambda: {"step": 2})
        writer.defer("metrics", broken)
        writer.write("failed", cause="disk full", message="the disk is full", lines=[])
    assert [event["kind"] for event in lines(run)] == ["failed"]


def test_closing_leaves_no_thread_and_no_event_behind(run):
    before = threading.active_count()
    writer = AsyncWriter(run)
    for step in range(1000):
        writer.defer("metrics", lambda step=step: {"step": step})
    writer.close()
    assert threading.active_count() == before
    assert [event["step"] for event in lines(run)] == list(range(1000))


def test_work_beside_is_done_again_and_again_until_it_breaks_which_is_told(run):
    done = []

    def work():
        done.append(threading.current_thread())
        if len(done) == 3:
            raise WorkbenchError("the folder is gone")

    with AsyncWriter(run) as writer:
        writer.beside(work)
        until(lambda: writer._problem is not None)
        with pytest.raises(WorkbenchError, match="the folder is gone"):
            writer.defer("metrics", lambda: {"step": 1})
        writer.defer("metrics", lambda: {"step": 2})
        until(lambda: run.events.read_bytes().endswith(b"\n"))
    assert threading.current_thread() not in done
    assert [event["step"] for event in lines(run)] == [2]
    assert len(done) == 3
