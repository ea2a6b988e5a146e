"""`run.notify`: a message when a run ends, fails, diverges or stalls; nothing at the other end can touch the run."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from engine.run import notify
from engine.run.compare import differences
from engine.run.notify import Notifier
from engine.run.store import ENDED, RunFolder
from tests.fault.test_runs_outlive import until

SECRET = "a-secret-name-of-mine"


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A webhook's address on the loopback, and what was posted to it."""
    got: list[dict[str, Any]] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.append({"path": self.path, "type": self.headers["Content-Type"], "body": body.decode()})
            code = 302 if self.path.startswith("/moved") else 404 if self.path.startswith("/gone") else 200
            self.send_response(code)
            self.send_header("Location", f"/hooks/{SECRET}")
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    http = HTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{http.server_port}", got
    http.shutdown()
    http.server_close()


def ended(run: RunFolder) -> None:
    until(lambda: run.state in ENDED and not run.supervisor())


def shown(run: RunFolder) -> str:
    """All that a run shows of itself: its events, its log, what it says in run.json beside the config."""
    said = {name: value for name, value in run.read_json().items() if name != "config"}
    return run.events.read_text() + run.log.read_text() + json.dumps(said)


def test_a_run_that_ends_is_told_once_and_its_address_stays_in_the_config(
    start: Callable[..., RunFolder], server: tuple[str, list[dict[str, Any]]]
) -> None:
    address, got = server
    one = start(steps=5, run={"notify": f"{address}/hooks/{SECRET}"})
    until(lambda: got)
    (post,) = got
    assert (post["path"], post["type"]) == (f"/hooks/{SECRET}", "application/json")
    told = json.loads(post["body"])
    text = told.pop("text")
    assert told == {"run": one.id, "state": "finished", "cause": "", "step": 5, "content": text}
    assert text.startswith(f"{one.id} finished: 5 steps, loss ")
    two = start(steps=5, raise_at=3, run={"notify": f"{address}/hooks/{SECRET}"})
    until(lambda: len(got) > 1)
    told = json.loads(got[1]["body"])
    assert (told["run"], told["state"], told["step"]) == (two.id, "failed", 3)
    assert told["cause"]
    assert "the small model broke" not in got[1]["body"]  # an error's text may hold a row
    for run in (one, two):
        until(lambda run=run: run.state in ENDED)
        assert SECRET not in shown(run)
    assert differences([{"run": {"notify": "a"}}, {"run": {"notify": "b"}}]) == []
    assert len(got) == 2


def test_a_stalled_or_absent_server_harms_no_run_and_is_a_line_in_its_log(start: Callable[..., RunFolder]) -> None:
    with socket.socket() as deaf, socket.socket() as absent:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        absent.bind(("127.0.0.1", 0))  # nobody listens
        ways = [f"http://127.0.0.1:{each.getsockname()[1]}/{SECRET}" for each in (deaf, absent)]
        silent, refused = (start(steps=5, run={"notify": way}) for way in ways)
        until(lambda: silent.state == refused.state == "finished")
        # The supervisor leaves at once, whatever the message waits for.
        until(lambda: not any((who := run.supervisor()) and who.alive for run in (silent, refused)), 10)
        host = ways[1].removeprefix("http://").partition("/")[0]
        line = f"run.notify: {host} could not be reached (ConnectionRefusedError); the run is not touched by it."
        until(lambda: line in refused.log.read_text())
        assert SECRET not in shown(silent) + shown(refused)


def test_a_message_has_its_time_and_goes_nowhere_else(
    server: tuple[str, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "LIMIT", 0.3)
    address, got = server
    message = {"run": "my-0001", "state": "finished", "cause": "", "step": 3, "text": "my-0001 finished: 3 steps"}
    assert notify.posted(f"{address}/moved/{SECRET}", message) == "refused it with status 302"
    assert notify.posted(f"{address}/gone/{SECRET}", message) == "refused it with status 404"
    assert [post["path"] for post in got] == [f"/moved/{SECRET}", f"/gone/{SECRET}"]
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        begun = time.monotonic()
        said = notify.posted(f"http://127.0.0.1:{deaf.getsockname()[1]}/{SECRET}", message)
        assert time.monotonic() - begun < 5
        assert said in ("did not answer within 0.3 s", "could not be reached (TimeoutError)")
    monkeypatch.setattr(notify, "host_of", lambda address: "ntfy.example.org")
    assert notify.posted(f"{address}/{SECRET}", message) == ""
    assert (got[-1]["type"], got[-1]["body"]) == ("text/plain; charset=utf-8", "my-0001 finished: 3 steps")


def test_a_run_that_diverges_or_stalls_is_told_once_each_time(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.run import store

    run = store.create(tmp_path / "runs", "version: 1\nrun: {notify: 'https://ntfy.sh/x'}\n", {"name": "my"})
    clock, posts = [100.0], []
    monkeypatch.setattr(notify.time, "monotonic", lambda: clock[0])
    told = Notifier(run)
    monkeypatch.setattr(told, "_post", lambda state, text, step, cause="": posts.append((state, text)))
    frame = {"v": 1, "rank": 0, "segment": 0}
    told.see([{**frame, "seq": 0, "t": 1.0, "kind": "started", "max_steps": 9}])
    told.see([{**frame, "seq": n, "t": 1.0 + n, "kind": "metrics", "step": n, "loss": 1.0} for n in (1, 2, 3)])
    told.tick()
    assert posts == []
    for _ in range(2):
        clock[0] += 31
        told.tick()
        told.tick()
        told.see([{**frame, "seq": 9, "t": 40.0, "kind": "gpu", "devices": []}])
    told.see([{**frame, "seq": 10, "t": 41.0, "kind": "diverged", "step": 4, "what": "loss"}])
    told.see([{**frame, "seq": 11, "t": 42.0, "kind": "diverged", "step": 5, "what": "loss"}])
    told.ended({"kind": "failed", "cause": "diverged"})
    assert posts[0] == ("stalled", "my-0001 is silent for 31 s at step 3")
    assert posts[-2:] == [
        ("diverged", "my-0001 diverged at step 4: its numbers are not finite"),
        ("failed", "my-0001 failed at step 3: diverged"),
    ]
    sizes = {**frame, "kind": "checkpoint", "state": "committed", "bytes": 100 << 20}
    monkeypatch.setattr(notify, "free_bytes", lambda run: free[0])
    told, free = Notifier(run), [500 << 20]
    monkeypatch.setattr(told, "_post", lambda state, text, step, cause="": posts.append((state, text)))
    posts.clear()
    told.see([{**sizes, "seq": n, "t": float(n), "step": n} for n in (1, 2)])
    for room in (500, 109, 50, 150, 90, 300, 100):  # filled, hardly freed, filled again only after there was room
        free[0] = room << 20
        for _ in range(2):
            clock[0] += 11
            told.tick()
    assert [state for state, _ in posts if state == "disk"] == ["disk", "disk"]
    assert posts[0] == ("disk", "my-0001 fills the disk: 109 MiB free, its next checkpoint needs 110 MiB; at step 0")
    quiet = store.create(tmp_path / "runs", "version: 1\n", {"name": "quiet"})
    silent = Notifier(quiet)
    monkeypatch.setattr(silent, "_post", lambda *_: pytest.fail("nobody asked for it"))
    silent.ended({"kind": "finished"})
