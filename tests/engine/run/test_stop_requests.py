"""Which requests end a worker, when, by what signal, and what is written of it; the worker is a process of this test's."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from engine.job import JobSupervisor
from engine.run import control, stop_requests
from engine.run.state_file import StateFile
from engine.run.stop_requests import StopRequests, Work
from engine.run.store import RunFolder
from engine.run.worker_process import WorkerProcess

DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
HEARS = "import time; print(flush=True); time.sleep(60)"


class Worker:
    def __init__(self, run: RunFolder, code: str) -> None:
        self.child = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE)
        assert self.child.stdout is not None
        self.child.stdout.readline()  # it has its handler
        self.process = WorkerProcess.started(run, self.child, "a token that nobody has", 1, 0)

    def gone(self, requests: StopRequests, ended_at: float | None = None) -> int | None:
        """The exit code after three looks of a supervisor, with a moment for signals to arrive."""
        for _ in range(3):
            requests.watch(self.process, ended_at)
            try:
                return self.child.wait(0.2)
            except subprocess.TimeoutExpired:
                continue
        return None


@pytest.fixture
def start(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> Iterator:
    monkeypatch.setattr(stop_requests, "NOW_SECONDS", 0.1)
    workers = []

    def begin(code: str, grace: float = 0.1) -> tuple[Worker, StopRequests]:
        run.update_json(state="running", grace_seconds=grace)
        workers.append(Worker(run, code))
        return workers[-1], StopRequests(run, StateFile(run))

    yield begin
    for worker in workers:
        worker.child.kill()
        worker.child.wait()
        worker.child.stdout.close()


@pytest.mark.parametrize(("code", "number"), [(HEARS, signal.SIGTERM), (DEAF, signal.SIGKILL)])
def test_a_worker_that_is_to_stop_now_is_sent_sigterm_and_sigkill_where_that_is_not_enough(run, start, code, number):
    worker, requests = start(code, grace=60.0)
    asked = control.request(run, "stop", "somebody", now=True)
    assert worker.gone(requests) == -number
    done, stopped = requests.last_events()
    assert (done["kind"], done["id"], done["status"], done["by"]) == ("control", asked, "done", "somebody")
    assert (stopped["kind"], stopped["by"]) == ("stopped", "somebody")
    assert stopped["message"].startswith(f"The worker was ended by {number.name} at once, as asked;")
    told = run.read_json()
    assert told["message"] == f"The worker is ended at once, as asked; it was sent {number.name}."
    assert told["state"] == "stopping"


def test_a_worker_has_its_grace_to_answer(run, start):
    worker, requests = start(HEARS, grace=60.0)
    control.request(run, "stop")
    assert worker.gone(requests) is None
    assert (requests.overdue, requests.last_events()) == (None, [])
    run.update_json(grace_seconds=0.01)
    assert worker.gone(requests) == -signal.SIGTERM
    assert "did not answer within 0 s" in requests.last_events()[-1]["message"]


def test_a_save_that_was_accepted_is_never_cut_short_and_a_stop_that_was_is(run, start):
    worker, requests = start(HEARS)
    save = control.request(run, "save_stop")
    requests.note({"kind": "control", "id": save, "status": "accepted"})
    assert worker.gone(requests) is None
    stop = control.request(run, "stop")
    requests.note({"kind": "control", "id": stop, "status": "accepted"})
    assert worker.gone(requests) == -signal.SIGTERM


def test_an_answer_that_was_given_is_not_given_twice(run, start):
    worker, requests = start(HEARS)
    asked = control.request(run, "stop", now=True)
    requests.note({"kind": "control", "id": asked, "status": "done"})
    assert worker.gone(requests) == -signal.SIGTERM
    assert [event["kind"] for event in requests.last_events()] == ["stopped"]


def test_a_worker_that_stays_after_its_last_word_is_ended_for_nobodys_sake(run, start, monkeypatch):
    worker, requests = start(DEAF)
    assert worker.gone(requests, time.monotonic()) is None
    monkeypatch.setattr(stop_requests, "LEAVE_SECONDS", 0.0)
    assert worker.gone(requests, time.monotonic()) == -signal.SIGKILL
    assert requests.last_events() == []
    told = run.read_json()
    assert told["state"] == "running"
    assert "said how the run ended and stays" in told["message"]


def test_what_asks_for_a_checkpoint_or_is_no_request_ends_nothing(run, start):
    worker, requests = start(HEARS)
    control.request(run, "checkpoint")
    control.request(run, "end_of_epoch")
    (run.control / "0.json").write_text('{"do": "stop"')
    (run.control / ".1.json").write_text('{"id": "1", "do": "stop", "now": true}')
    assert worker.gone(requests) is None


class Looks:
    """A supervisor that looks after so many seconds, by a clock of its own; `sent` is the signal that run.json tells of."""

    def __init__(self, run: RunFolder, worker: Worker, requests: StopRequests, clock: SimpleNamespace) -> None:
        self.run, self.worker, self.requests, self.clock = run, worker, requests, clock

    def after(self, seconds: float, ended_at: float | None = None) -> str:
        self.clock.now += seconds
        self.run.update_json(message="")
        self.requests.watch(self.worker.process, ended_at)
        message = self.run.read_json()["message"]
        return message.rpartition(" ")[2].rstrip(".") if message else ""


@pytest.fixture
def look(run, start, monkeypatch):
    def begin(code: str) -> Looks:
        worker, requests = start(code, grace=60.0)
        clock = SimpleNamespace(now=1000.0)
        monkeypatch.setattr(stop_requests, "time", SimpleNamespace(monotonic=lambda: clock.now))
        monkeypatch.setattr(stop_requests, "NOW_SECONDS", 5.0)
        return Looks(run, worker, requests, clock)

    return begin


def saving(run, state="saving"):
    return {"kind": "checkpoint", "path": "checkpoint-7", "state": state}


@pytest.mark.parametrize("do", ["stop", "save_stop"])
def test_a_save_under_way_is_waited_for_as_long_as_it_moves(run, look, do):
    looks = look(HEARS)
    looks.requests.note_save(saving(run))
    control.request(run, do)
    (run.checkpoints / "checkpoint-7.tmp").mkdir()
    for part in range(4):
        (run.checkpoints / "checkpoint-7.tmp" / str(part)).write_bytes(b"weights")
        assert looks.after(500) == ""
    looks.requests.note_save(saving(run, "committed"))
    assert looks.after(59) == "", "it has its grace from there on"
    assert looks.after(2) == "SIGTERM"
    assert looks.worker.child.wait(10) == -signal.SIGTERM


@pytest.mark.parametrize("accepted", [True, False])
def test_a_save_that_stands_still_ends_the_worker_in_bounded_time(run, look, accepted):
    looks = look(DEAF)
    looks.requests.note_save(saving(run))
    asked = control.request(run, "save_stop")
    if accepted:
        looks.requests.note({"kind": "control", "id": asked, "status": "accepted"})
    assert [looks.after(seconds) for seconds in (0, 599, 59, 3, 59, 2)] == ["", "", "", "SIGTERM", "", "SIGKILL"]
    assert looks.worker.child.wait(10) == -signal.SIGKILL
    assert "its save stood still for 600 s" in looks.requests.last_events()[-1]["message"]


def test_who_is_to_stop_now_is_not_saved_by_a_save(run, look):
    looks = look(DEAF)
    looks.requests.note_save(saving(run))
    control.request(run, "stop", now=True)
    assert looks.after(0) == "SIGTERM"
    assert looks.after(1, ended_at=looks.clock.now) == ""
    assert looks.after(5, ended_at=looks.clock.now) == "SIGKILL", "its last word gives it no more time"


def test_a_worker_that_obeyed_late_may_leave(run, look):
    looks = look(DEAF)
    control.request(run, "save_stop")
    assert [looks.after(seconds) for seconds in (0, 61, 39)] == ["", "SIGTERM", ""]
    ended_at = looks.clock.now
    assert [looks.after(seconds, ended_at) for seconds in (0, 29, 2, 5)] == ["", "", "SIGTERM", "SIGKILL"]


@pytest.mark.parametrize("link", [True, False])
def test_requests_that_cannot_be_listed_are_none(run, start, tmp_path, link):
    worker, requests = start(HEARS)
    run.control.rmdir()
    if link:
        run.control.symlink_to(tmp_path)
    assert worker.gone(requests) is None
    assert not control.asks_to_end(run)
    assert control.Controls(run).pending() == []


COMPUTES = "import time; print(flush=True); end = time.time() + 60\nwhile time.time() < end: pass"


def test_a_long_step_that_is_to_be_saved_is_waited_for_while_it_computes_and_no_longer(run, start, monkeypatch):
    monkeypatch.setattr(stop_requests, "LOOK_SECONDS", 0.1)
    worker, requests = start(COMPUTES, grace=0.3)
    control.request(run, "save_stop")
    assert [worker.gone(requests) for _ in range(3)] == [None] * 3
    assert requests.overdue is None
    monkeypatch.setattr(stop_requests, "LONG_STEP_SECONDS", 1.0)
    assert worker.gone(requests) == -signal.SIGTERM


def test_what_was_waited_for_and_how_long_is_told(run, look, monkeypatch):
    """A step that computes for half an hour is not said to have been given the grace of a minute."""

    def told(*steps: tuple[float, float], do: str = "save_stop", saves: int = 0) -> str:
        """After looks so many seconds apart, between which it computed so long; the first `saves` of them in a save."""
        looks, busy = look(HEARS), {(1, 1, 1): 0.0}
        monkeypatch.setattr(looks.worker.process, "busy_seconds", lambda: dict(busy))
        looks.requests.note_save(saving(run, "saving" if saves else "committed"))
        asked = control.request(run, do)
        for number, (passed, computed) in enumerate(steps, 1):
            busy[1, 1, 1] += computed
            if looks.after(passed) == "SIGTERM":
                (run.control / f"{asked}.json").unlink()
                return looks.requests.last_events()[-1]["message"]
            if number == saves:
                looks.requests.note_save(saving(run, "committed"))
        raise AssertionError("it was not ended")

    minutes = [(0.0, 0.0), *[(50.0, 50.0)] * 40]
    assert "because its step still computed 1800 s after it was asked, and no step is given more;" in told(*minutes)
    assert "because its step still computed 1800 s after its save, and" in told((0, 0), (90, 0), *minutes, saves=2)
    idle = told(*minutes[:4], (50.0, 0.0), (11.0, 0.0))
    assert "because it did not answer within 60 s after it last computed, 211 s after it was asked;" in idle
    assert "because it did not answer within 60 s;" in told((0, 0), (61, 0))
    assert "because it did not answer within 60 s;" in told(*minutes, do="stop")
    late = told((0, 0), (30, 0), (61, 0), saves=2)
    assert "because it did not answer within 60 s after its save, 91 s after it was asked;" in late


def test_who_wants_a_computing_worker_to_stop_without_a_save_gets_it_within_the_grace(run, start):
    worker, requests = start(COMPUTES)
    control.request(run, "stop")
    assert worker.gone(requests) == -signal.SIGTERM


def test_a_job_whose_time_ends_waits_for_no_long_step_and_is_queued_again(run, start, monkeypatch):
    monkeypatch.setattr(stop_requests, "LOOK_SECONDS", 0.1)
    worker, requests = start(COMPUTES, grace=0.3)
    job = JobSupervisor(run, "42")
    job.worker, job.requests = worker.process, requests
    job.on_signal(signal.SIGUSR1, None)
    end = time.monotonic() + 5
    while worker.child.poll() is None and time.monotonic() < end:
        job._watch_requests()
        time.sleep(0.05)
    assert worker.child.poll() == -signal.SIGTERM
    job.final = requests.last_events()[-1]
    job._close(worker.child.poll())
    assert job.goes_on
    assert run.state == "queued"


def test_the_grace_begins_when_a_worker_no_longer_computes(run, look, monkeypatch):
    looks = look(HEARS)
    busy = {(1, 1, 1): 0.0}
    monkeypatch.setattr(looks.worker.process, "busy_seconds", lambda: dict(busy))
    control.request(run, "save_stop")
    assert looks.after(0) == ""
    for _ in range(3):
        busy[1, 1, 1] += 100.0
        assert looks.after(100) == ""
    assert [looks.after(seconds) for seconds in (30, 29, 2)] == ["", "", "SIGTERM"]


HELPED = """
import sys, threading, time
def help():
    while time.thread_time() < 0.5: pass
    print(flush=True)
    sys.stdin.readline()
helper = threading.Thread(target=help, daemon=True)
helper.start()
while helper.is_alive(): pass
print(flush=True)
while True: pass
"""


def test_a_worker_computes_also_when_a_thread_that_had_computed_ends(run, monkeypatch):
    monkeypatch.setattr(stop_requests, "LOOK_SECONDS", 0.1)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-S", "-c", HELPED], **pipes) as child:
        try:
            child.stdout.readline()
            worker = WorkerProcess.started(run, child, "a token that nobody has", 1, 0)
            work = Work(worker, time.monotonic())
            child.stdin.write(b"\n")
            child.stdin.flush()
            child.stdout.readline()
            time.sleep(0.15)
            assert work.goes_on(worker, time.monotonic())
        finally:
            child.kill()
