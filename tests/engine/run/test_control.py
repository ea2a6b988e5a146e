"""Requests: one small file each, answered by an event; nonsense is refused, never fatal."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import pytest

from engine.errors import WorkbenchError
from engine.run import control
from engine.run.async_writer import AsyncWriter
from engine.run.control import Controls
from engine.run.events import EventWriter
from engine.run.tail import Tail
from engine.run.view import RunView, fold


@pytest.fixture
def worker(run):
    with EventWriter(run) as writer:
        yield Controls(run, writer, every=0.0)


def view_of(run) -> RunView:
    return fold(RunView(), Tail(run.events).read())


def test_a_request_is_seen_once_in_order_and_its_answer_reaches_the_view(run, worker):
    ids = [control.request(run, do, "me") for do in control.DO]
    asked = worker.pending()
    assert [(request.id, request.do, request.by) for request in asked] == list(
        zip(ids, control.DO, ["me"] * 4, strict=True)
    )
    assert worker.pending() == []
    worker.answer(asked[0], "accepted")
    assert control.answer(view_of(run), ids[0]) == {"do": "stop", "status": "accepted", "message": ""}
    assert control.answer(view_of(run), ids[1]) is None
    worker.answer(asked[0], "done", "at step 5")
    assert control.answer(view_of(run), ids[0])["status"] == "done"
    assert len(list(run.control.iterdir())) == 3


@pytest.mark.parametrize(
    ("do", "waits"), [("stop", True), ("save_stop", True), ("checkpoint", False), ("end_of_epoch", False)]
)
def test_whether_a_stop_waits_is_known_without_hearing_it(run, worker, do, waits):
    assert not worker.stop_waits()
    id = control.request(run, do)
    assert worker.stop_waits() is worker.stop_waits() is waits
    assert [request.id for request in worker.pending()] == [id]
    assert not worker.stop_waits()


BAD = {
    "empty": b"",
    "not JSON": b"{",
    "a list": b"[]",
    "deep": b"[" * 4000,
    "no id": b'{"do": "stop"}',
    "an id that is no text": b'{"id": 1, "do": "stop"}',
    "unknown": b'{"id": "1", "do": "format the disk \x1b[2J"}',
    "bytes": b"\xff\xfe\x00",
    "long": b'{"id": "1", "do": "stop", "x": "' + b"y" * 10_000 + b'"}',
}


@pytest.mark.parametrize("bad", BAD)
def test_what_is_no_request_is_refused_and_taken_away(run, worker, bad):
    (run.control / "x.json").write_bytes(BAD[bad])
    assert worker.pending() == []
    (answer,) = view_of(run).controls.values()
    assert answer["status"] == "refused"
    assert "\x1b" not in answer["message"]
    assert list(run.control.iterdir()) == []


def test_folders_pipes_and_links_are_refused(run, worker, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text(json.dumps({"id": "1", "do": "stop"}))
    (run.control / "a").mkdir()
    os.mkfifo(run.control / "b")
    (run.control / "c").symlink_to(secret)
    assert worker.pending() == []
    assert [answer["status"] for answer in view_of(run).controls.values()] == ["refused"] * 3
    assert secret.exists()
    assert [path.name for path in run.control.iterdir() if not path.name.startswith(".")] == []


def test_a_half_written_request_is_not_seen(run, worker):
    (run.control / ".half").write_bytes(b'{"id"')
    assert worker.pending() == []
    assert view_of(run).controls == {}


def test_a_run_that_ended_cannot_be_asked(run):
    run.update_json(state="finished")
    with pytest.raises(WorkbenchError, match="is finished"):
        control.request(run, "stop")
    with pytest.raises(WorkbenchError, match="must be one of"):
        control.request(run, "explode")


def test_a_signal_asks_to_save_and_stop(run, worker):
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        worker.on_signals()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGHUP)
        (asked,) = worker.pending()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert (asked.do, asked.by) == ("save_stop", "SIGTERM")
    worker.answer(asked, "done")
    assert view_of(run).controls["signal-SIGTERM"]["status"] == "done"


def test_a_signal_after_a_plain_stop_saves_nothing(run, worker):
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        worker.on_signals()
        worker.pending()
        control.request(run, "stop", now=True)
        os.kill(os.getpid(), signal.SIGTERM)
        assert [asked.do for asked in worker.pending()] == ["stop"]
        os.kill(os.getpid(), signal.SIGINT)
        assert worker.pending() == []
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_request_is_heard_whenever_it_comes_and_a_quiet_folder_is_not_listed(run, monkeypatch):
    controls = Controls(run, every=0.0)
    listed = []
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda place: listed.append(place) or listdir(place))
    for _ in range(20):  # within one tick of the file system's clock
        asked = control.request(run, "checkpoint")
        assert [each.id for each in controls.pending()] == [asked]
    time.sleep(0.1)
    controls.pending()
    listed.clear()
    for _ in range(50):
        assert controls.pending() == []
    assert len(listed) <= 1
    os.utime(run.control, (1, 1))
    asked = control.request(run, "stop")
    os.utime(run.control, ns=(controls._changed, controls._changed))  # a file system that tells late
    deadline = time.monotonic() + 5
    heard = []
    while not heard and time.monotonic() < deadline:
        heard = controls.pending()
    assert [each.id for each in heard] == [asked]


def test_who_listens_hears_each_request_once_and_a_step_looks_at_no_file(run, monkeypatch):
    with AsyncWriter(run) as writer:
        ear = Controls(run, writer, every=0.0)
        ear.listen(writer)
        own, looked = threading.current_thread(), []
        listdir = os.listdir
        monkeypatch.setattr(os, "listdir", lambda *a: looked.append(threading.current_thread()) or listdir(*a))
        ids, heard = [], []
        (run.control / "nonsense.json").write_text("{")
        for do in ("checkpoint", "checkpoint", "end_of_epoch"):
            ids.append(control.request(run, do))
            deadline = time.monotonic() + 10
            while len(heard) < len(ids) and time.monotonic() < deadline:
                heard += [each.id for each in ear.pending()]
                time.sleep(0.01)
        assert heard == ids
        assert ear.pending() == []
        assert looked
        assert own not in looked
    assert view_of(run).controls["nonsense.json"]["status"] == "refused"


def test_a_signal_right_after_a_stop_finds_it_before_the_listener_does(run):
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    with AsyncWriter(run) as writer:
        ear = Controls(run, writer)
        ear.listen(writer)
        try:
            ear.on_signals()
            control.request(run, "stop", now=True)
            os.kill(os.getpid(), signal.SIGTERM)
            assert [asked.do for asked in ear.pending()] == ["stop"]
            assert ear.pending() == []
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
