"""Queued runs: they begin when a device is free or another run has ended, in an order that can be changed, whoever is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.errors import RunBusy, WorkbenchError
from engine.run import control, devices, launch
from engine.run.devices import Card, Choice
from engine.run.index import peek
from engine.run.process import send
from engine.run.queue import move, queue_of, waiting_for
from engine.run.store import RunFolder

GIB = 1 << 30


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a machine with GPUs: what is free there is another's business."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def queued(runs: Path) -> Callable[..., RunFolder]:
    """A run of the small worker that waits."""

    def queued(name: str, after: RunFolder | None = None, steps: int = 3) -> RunFolder:
        text = json.dumps({"steps": steps, "step_seconds": 0.01})
        info = {"method": "small", "grace_seconds": 30}
        return launch.launch(text, runs_dir=runs, name=name, info=info, queue=True, after=after)

    return queued


def until(hold: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not hold():
        assert time.monotonic() < end, what
        time.sleep(0.1)


def waits(run: RunFolder) -> str:
    view = peek(run).view
    assert view.state == "queued", view
    return view.cause


def test_a_queued_run_waits_for_the_device_and_then_runs(
    start: Callable[..., RunFolder], queued: Callable[..., RunFolder]
) -> None:
    first = start(steps=100_000)
    second = queued("second")
    until(lambda: waits(second) == "waits for a free device", "it says what it waits for")
    assert not second.events.exists()
    control.request(first, "stop", now=True)
    until(lambda: second.state == "finished", "it ran once the device was free")
    assert first.state == "stopped"
    assert second.read_json()["devices"] == []


def test_the_order_can_be_changed_and_the_first_in_it_begins_first(
    start: Callable[..., RunFolder], queued: Callable[..., RunFolder]
) -> None:
    busy = start(steps=100_000)
    one, two, three = queued("one", steps=100_000), queued("two", steps=100_000), queued("three", steps=100_000)
    assert [run.id for run in queue_of(busy.path.parent)] == [one.id, two.id, three.id]
    assert [run.id for run in move(three, 0)] == [three.id, one.id, two.id]
    assert [run.id for run in move(one, 2)] == [three.id, two.id, one.id]
    assert [run.id for run in move(one, 1)] == [three.id, one.id, two.id]
    until(lambda: waits(one) == f"waits behind {three.id}", "it names who is before it")
    until(lambda: waits(two) == "waits behind 2 runs", "or how many are")
    with pytest.raises(WorkbenchError, match="only a queued run"):
        move(busy, 0)
    control.request(busy, "stop", now=True)
    until(lambda: three.state == "running", "the first in the new order began")
    assert [one.state, two.state] == ["queued", "queued"]


def test_a_queued_run_is_cancelled_and_leaves_no_process(
    start: Callable[..., RunFolder], queued: Callable[..., RunFolder]
) -> None:
    start(steps=100_000)
    run = queued("second")
    watcher = run.supervisor()
    assert watcher is not None
    control.request(run, "stop", by="anna")
    until(lambda: run.state == "stopped", "it was taken out")
    assert peek(run).view.cause == "Taken out of the queue by anna before it began."
    until(lambda: not watcher.alive, "nobody waits any more")
    assert run.worker() is None


def test_a_killed_supervisor_is_replaced_and_the_run_still_waits_and_runs(
    start: Callable[..., RunFolder], queued: Callable[..., RunFolder]
) -> None:
    busy = start(steps=100_000)
    run = queued("second")
    killed = run.supervisor()
    assert killed is not None
    send(killed, signal.SIGKILL)
    until(lambda: not killed.alive, "it is gone")
    assert run.state == "queued"
    with pytest.raises(RunBusy, match="still queued"):
        launch.resume(run)  # it is given a supervisor and waits on
    again = run.supervisor()
    assert again is not None
    assert again.alive
    assert run.state == "queued"
    control.request(busy, "stop", now=True)
    until(lambda: run.state == "finished", "it ran")


def test_after_another_run_waits_for_that_one_alone_even_if_a_device_is_free(
    start: Callable[..., RunFolder], queued: Callable[..., RunFolder]
) -> None:
    first = start(steps=100_000)
    later = queued("later", after=first)
    until(lambda: waits(later) == f"waits for {first.id} to end", "it names the run")
    behind = queued("behind", steps=100_000)
    until(lambda: waits(behind) == "waits for a free device", "who waits for another run holds nobody up")
    worker = first.worker()
    assert worker is not None
    send(worker, signal.SIGKILL)
    until(lambda: first.state == "failed", "it failed")
    until(lambda: behind.state == "running" or later.state == "finished", "one of them has its turn")
    if behind.state == "running":
        control.request(behind, "stop", now=True)
    until(lambda: later.state == "finished", "also after a run that failed")


def test_a_card_is_free_without_another_run_and_with_little_memory_in_use() -> None:
    cards = [Card("0", 79 * GIB, 1 * GIB), Card("1", 40 * GIB, 39 * GIB)]
    assert devices.free("auto", set(), 0, cards) == Choice(("0",), 1)
    assert devices.free("auto", {"0"}, 0, cards) is None
    assert devices.free([1], set(), 0, cards) is None
    assert devices.free(2, set(), 0, cards) is None
    assert devices.free("auto", set(), 1, cards) == Choice(("0",), 1), "who works on the CPU holds no card"
    assert devices.free("auto", set(), 0, []) == Choice((), 1)
    assert devices.free("auto", set(), 1, []) is None
    with pytest.raises(WorkbenchError, match="no GPU 7"):
        devices.free([7], set(), 0, cards)


def test_a_queue_that_was_just_moved_is_told_in_its_new_order(tmp_path: Path) -> None:
    """Supervisors look once a second; until then they have said what held before."""

    def waiting(name: str, message: str, **values: object) -> RunFolder:
        run = RunFolder(tmp_path / name)
        run.path.mkdir()
        (run.path / "config.yaml").write_text("version: 1\n")
        (run.path / "run.json").write_text(json.dumps({"id": name, "state": "queued", "message": message, **values}))
        return run

    first = waiting("a-0001", "waits for a free device", created=1.0)
    second = waiting("b-0001", "waits behind a-0001", created=2.0)
    third = waiting("c-0001", "waits behind 2 runs", created=3.0)
    later = waiting("d-0001", "", created=4.0, after=str(first.path))
    words = ["waits for a free device", "waits behind a-0001", "waits behind 2 runs", "waits for a-0001 to end"]
    assert waiting_for([first, second, third, later]) == words
    assert waiting_for(move(third, 0)) == [words[0], "waits behind c-0001", words[2], words[3]]


def test_the_commands_list_move_and_cancel(start: Callable[..., RunFolder], queued: Callable[..., RunFolder]) -> None:
    busy = start(steps=100_000)
    one, two = queued("one"), queued("two")
    root = str(busy.path.parent)

    def workbench(*words: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        command = [sys.executable, "-m", "workbench", *words, "--runs", root]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)

    moved = workbench("queue", two.id, "--first", "--json")
    assert moved.returncode == 0, moved.stderr
    assert [entry["id"] for entry in json.loads(moved.stdout)] == [two.id, one.id]
    listed = workbench("queue")
    assert [line.split()[:2] for line in listed.stdout.splitlines()] == [["1", two.id], ["2", one.id]]
    assert "queued" in workbench("runs").stdout
    odd = workbench("queue", one.id)
    assert odd.returncode == 2
    assert "--first, --last or --place N" in odd.stderr
    refused = workbench("queue", busy.id, "--last")
    assert refused.returncode == 1
    assert "only a queued run has a place" in refused.stderr
    stopped = workbench("stop", one.id)
    assert stopped.returncode == 0, stopped.stderr
    assert one.state == "stopped"
    assert [run.id for run in queue_of(root)] == [two.id]
