"""A worker that waits takes the run at once; it goes with its window, and where it is gone or does not fit, the run starts
one as ever."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.run import warm
from engine.run.process import carries, send
from engine.run.spawn import TOKEN
from engine.run.store import RunFolder, runs_in
from engine.run.warm import SWITCH, Waiting, Wanted, WarmWorker
from engine.session.build import BuildSession
from engine.session.draft import Draft
from tests.caches import own_cache
from tests.prestarted import prestarted

WANTED = Wanted("sft", (), (), ("scipy", "wandb"), {"torch": "2"})
WINDOW = """
import sys, time
import prestarted
prestarted.install()
from pathlib import Path
from engine.session.build import BuildSession
from engine.session.draft import Draft
session = BuildSession(Draft(sys.argv[2]), lambda do, **asked: None, runs=sys.argv[1])
session.warm_up("review")
while not session.warm.summary():
    time.sleep(0.05)
print(session.warm._pid, flush=True)
sys.stdin.readline()
print(session.launch()().path, flush=True)
time.sleep(600)
"""


def few_rows() -> str:
    """The demo's config on so few rows that preparing them takes no time."""
    draft = Draft.new("demo")
    draft.set("data.train", [{"path": "builtin/dates", "rows": 128}])
    draft.set("data.eval", [{"path": "builtin/dates", "split": "eval", "rows": 8}])
    return draft.text()


def until(condition: Callable[[], object], seconds: float = 120) -> float:
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < seconds, "it did not happen in time"
        time.sleep(0.02)
    return time.monotonic() - begun


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]
    except (FileNotFoundError, ProcessLookupError):  # it may go while its file is read
        return False


def kinds(run: RunFolder) -> list[str]:
    return [
        json.loads(line)["kind"] for line in run.events.read_text("utf-8").splitlines(keepends=True) if line[-1] == "\n"
    ]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(SWITCH, "1")
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    root = tmp_path / "runs"
    yield root
    for run in runs_in(root):
        for who in (run.supervisor(), run.worker()):
            if who is not None:
                send(who, signal.SIGKILL)


@pytest.fixture
def session(runs: Path) -> Iterator[BuildSession]:
    found = BuildSession(Draft(few_rows()), lambda do, **asked: None, runs=runs)
    yield found
    found.close()


def waiting(session: BuildSession, step: str = "review") -> int:
    """The worker that waits once this step is read."""
    session.warm_up(step)
    until(session.warm.summary)
    return session.warm._pid


@pytest.mark.slow
def test_a_run_that_was_read_first_takes_its_first_step_within_a_fraction_of_what_the_imports_take(
    session, monkeypatch
):
    monkeypatch.setenv(prestarted.COLD, "1")  # the imports are what is waited for
    session.warm_up("method")
    assert not session.warm.summary()
    begun = time.monotonic()
    pid = waiting(session)
    assert "is loading the libraries" in session.warm.summary()
    until(lambda: session.warm.ready)
    imports = time.monotonic() - begun
    assert "waits with the libraries (" in session.warm.summary()
    assert "MiB of memory)" in session.warm.summary()
    begun = time.monotonic()
    run = session.launch()()
    until(lambda: "metrics" in kinds(run))
    assert time.monotonic() - begun < min(0.7 * imports, 20.0)
    known = run.read_json()
    assert known["worker_pid"] == pid
    assert carries(pid, f"{TOKEN}={known['token']}")
    assert os.readlink(f"/proc/{pid}/cwd") == str(run.path)
    assert os.readlink(f"/proc/{pid}/fd/2") == str(run.log)
    assert "started" in kinds(run)
    assert not session.warm.summary()
    os.kill(pid, signal.SIGSEGV)
    until(lambda: run.state == "failed")
    assert "SIGSEGV" in run.read_json()["message"]  # its supervisor is its parent, and knows how it ended


def test_nothing_waits_once_the_window_is_killed_and_a_run_that_was_launched_goes_on(runs):
    windows = [
        subprocess.Popen([sys.executable, "-P", "-c", WINDOW, str(runs), few_rows()], stdin=-1, stdout=-1, text=True)
        for _ in (1, 2)
    ]
    pids = [int(window.stdout.readline()) for window in windows]
    windows[1].stdin.write("\n")
    windows[1].stdin.flush()
    run = RunFolder(windows[1].stdout.readline().strip())
    for window in windows:
        window.kill()
        window.wait()
    until(lambda: not alive(pids[0]), 20)
    until(lambda: kinds(run).count("metrics") > 2)
    assert run.state == "running"
    assert (run.worker().pid, run.supervisor().alive) == (pids[1], True)
    assert os.getsid(pids[1]) == pids[1]


def test_a_waiting_worker_that_is_killed_is_replaced(session):
    pid = waiting(session)
    os.kill(pid, signal.SIGKILL)
    run = session.launch()()
    until(lambda: "metrics" in kinds(run))
    assert run.worker().pid != pid


def test_one_that_dies_while_the_run_is_handed_to_it_is_replaced_too(session):
    pid = waiting(session)
    os.kill(pid, signal.SIGSTOP)  # it is there, and will never read what it is given
    run = session.launch()()
    assert run.worker().pid == pid
    os.kill(pid, signal.SIGKILL)
    until(lambda: "metrics" in kinds(run))
    assert run.worker().pid != pid
    assert not {"failed", "restart"} & set(kinds(run))


def test_one_that_does_not_fit_goes(session, monkeypatch):
    pid = waiting(session, "launch")
    monkeypatch.setenv("SOMETHING_ELSE", "1")
    run = session.launch()()
    until(lambda: not alive(pid))
    assert run.worker().pid != pid


def test_it_serves_a_run_that_wants_the_same_and_lacks_no_package_that_the_run_may_use():
    assert WANTED.serves(WANTED)
    assert WANTED.serves(Wanted("dpo", (), (), ("torchao", "scipy", "wandb"), {"torch": "2"}))
    for other in (
        Wanted("sft", ("0",), (), WANTED.without, {"torch": "2"}),
        Wanted("sft", (), ("HF_TOKEN",), WANTED.without, {"torch": "2"}),
        Wanted("sft", (), (), ("scipy",), {"torch": "2"}),
        Wanted("sft", (), (), WANTED.without, {"torch": "3"}),
    ):
        assert not WANTED.serves(other)


def test_it_is_gone_when_nobody_asked_for_long_and_none_comes_where_it_is_not_wanted_or_memory_is_short(
    runs, session, monkeypatch
):
    monkeypatch.setattr(warm, "IDLE_SECONDS", 0.5)
    window, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with window, theirs:
        waits = Waiting(WANTED, "0" * 32)
        assert waits.wait_for_run(theirs) == ""
        waits.end()
    assert not alive(waits.child.pid)
    for change in (
        lambda: monkeypatch.setattr(warm, "NEEDED_BYTES", 1 << 60),
        lambda: monkeypatch.setenv(SWITCH, "0"),
        session.warm.close,
    ):
        with monkeypatch.context():
            change()
            session.warm.prepare(WANTED)
            assert session.warm._line is None


def test_what_is_closed_while_it_begins_leaves_nothing(runs):
    worker = WarmWorker()
    worker.prepare(WANTED)
    until(worker.summary)
    pid = worker._pid
    worker.close()
    until(lambda: not alive(pid), 20)
    worker.prepare(WANTED)
    assert not worker.summary()
