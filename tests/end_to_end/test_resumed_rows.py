"""A run resumed after its rows were rewritten: nothing goes on unasked, rows and tokens are named, both ways on hold."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.client import Inspector
from engine.data.cache_entries import cache_folder, locked
from engine.run import launch, store
from engine.run.process import send
from engine.run.store import ENDED, RunFolder
from engine.run.tail import Tail
from engine.run.view import RunView, fold
from tests import warm
from tests.caches import own_cache
from tests.prestarted import prestarted
from widgets import Monitor
from workbench.cli.following import status_line
from workbench.panels.watching import doing

pytestmark = [pytest.mark.timeout(300)]

CONFIG = """\
version: 1
model: {name: builtin/tiny, dtype: float32}
data: {train: [{path: rows.jsonl}], max_length: 128}
optim: {max_steps: 400, per_device_train_batch_size: 2}
run: {save_steps: 5, grace_seconds: 5, devices: 1, name: my}
"""


def rows() -> list[dict[str, Any]]:
    def chat(number: int) -> list[dict[str, str]]:
        question, answer = f"What is {number} and {number}?", f"It is {2 * number}."
        return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    return [{"messages": chat(number)} for number in range(40)]


def write(place: Path, found: list[dict[str, Any]]) -> None:
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))


@pytest.fixture(scope="module")
def inspector() -> Iterator[Inspector]:
    with Inspector() as shared:
        yield shared


def workbench(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return warm.command(*words, cwd=place, timeout=200)


def events(run: RunFolder, kind: str) -> list[dict[str, Any]]:
    tail, found = Tail(run.events), []
    while batch := tail.read():
        found += [event for event in batch if event["kind"] == kind]
    return found


def until(condition: Callable[[], Any], seconds: float = 120.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "it did not happen in time"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a real run that was stopped after a checkpoint; its rows lie beside its config."""
    place = tmp_path_factory.mktemp("place")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_CACHE", own_cache(tmp_path_factory.mktemp("cache")))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, (prestarted.HERE, prestarted.ROOT))))
        patch.delenv("WORKBENCH_RUNS", raising=False)
        write(place, rows())
        (place / "my.yaml").write_text(CONFIG)
        begun = workbench(place, "train", "my.yaml", "--detach")
        assert begun.returncode == 0, begun.stderr
        (run,) = store.runs_in(place / "runs")
        until(lambda: [event for event in events(run, "checkpoint") if event["state"] == "committed"])
        assert workbench(place, "stop", "my-0001").returncode == 0
        until(lambda: run.state in ENDED and not any(who and who.alive for who in (run.supervisor(), run.worker())))
        yield place


@pytest.fixture
def stopped(place: Path, tmp_path: Path) -> Iterator[RunFolder]:
    """That run; what a test makes of its folder is undone."""
    shutil.copytree(place, tmp_path / "kept", symlinks=True)
    (run,) = store.runs_in(place / "runs")
    yield run
    for who in (run.supervisor(), run.worker()):
        if who is not None:
            send(who, signal.SIGKILL)
            until(lambda who=who: not who.alive)
    shutil.rmtree(place)
    shutil.copytree(tmp_path / "kept", place, symlinks=True)


def rewritten() -> list[dict[str, Any]]:
    """Row 3 has another answer, the last two are gone."""
    found = rows()[:-2]
    found[3]["messages"][1]["content"] = "It is 7."
    return found


def test_rows_rewritten_since_the_stop_are_named_and_the_run_stays_as_it_is(
    stopped: RunFolder, inspector: Inspector
) -> None:
    place = stopped.path.parents[1]
    before = stopped.json.read_bytes()
    write(place, rewritten())
    with warm.sharing(inspector):
        refused = warm.here("resume", "my-0001", cwd=place)
    assert refused.returncode == 1
    assert "data.train: row 3 of 40 differs from what the run was trained on" in refused.stderr
    assert "2 rows (38, 39) are gone" in refused.stderr
    assert "'6' became '7'" in refused.stderr
    assert "--against my-0001" in refused.stderr
    assert "workbench resume my-0001 --accept-data" in refused.stderr
    assert stopped.json.read_bytes() == before
    assert len(events(stopped, "started")) == 1

    against = ("preview", "my.yaml", "--against", "my-0001")
    with warm.sharing(inspector):
        shown = warm.here(*against, "--rows", "1", cwd=place)
        described = warm.here(*against, "--json", cwd=place)
    assert shown.returncode == 0, shown.stderr
    assert "row 3\n" in shown.stdout
    assert "It is [-6-]{+7+}." in shown.stdout
    found = json.loads(described.stdout)
    assert found["splits"]["train"]["changed"] == [3]
    assert found["splits"]["train"]["removed"] == [38, 39]
    changed = [token for token in found["rows"][0]["parts"]["input"] if token["op"] != "same"]
    assert [(token["op"], token["text"], token["trained"]) for token in changed] == [
        ("removed", "6", True),
        ("added", "7", True),
    ]
    gone = found["rows"][1]["parts"]["input"]
    assert {token["op"] for token in gone} == {"removed"}
    assert "What is 38 and 38?" in "".join(token["text"] for token in gone)

    accepted = workbench(place, "resume", "my-0001", "--accept-data", "--detach")
    assert accepted.returncode == 0, accepted.stderr
    until(lambda: len(events(stopped, "started")) == 2)
    said = [event["message"] for event in events(stopped, "finding") if "as accepted" in event["message"]]
    assert len(said) == 1
    assert "row 3 of 40" in said[0]
    # What was accepted is what the run is held to from now on.
    workbench(place, "stop", "my-0001")
    until(lambda: stopped.state in ENDED)
    again = workbench(place, "resume", "my-0001", "--detach")
    assert again.returncode == 0, again.stderr


def test_the_notebook_asks_about_the_rows_and_goes_on_with_them_by_a_button(
    stopped: RunFolder, inspector: Inspector
) -> None:
    write(stopped.path.parents[1], rewritten())
    before = stopped.json.read_bytes()
    monitor = Monitor(stopped)

    def ask(do: str, **more: Any) -> dict[str, Any]:
        return monitor.answer({"id": "1", "do": do, "run": stopped.id, **more}).data

    def now() -> list[Any]:
        return ask("watch")["parts"]["now"]

    with warm.sharing(inspector):
        assert ask("resume")["ok"]
        until(lambda: now()[3] != "resuming")
    said, rows_changed = now()[3:5]
    assert rows_changed is True
    assert "row 3 of 40 differs from what the run was trained on" in said
    assert stopped.json.read_bytes() == before
    assert ask("resume", accept_data=True)["ok"]
    until(lambda: len(events(stopped, "started")) == 2)
    assert stopped.read_json()["accept_data"] is True
    assert any("as accepted" in event["message"] for event in events(stopped, "finding"))
    assert now()[3:5] == ["", False]
    monitor.close()


def test_a_file_that_was_only_touched_goes_on_unasked(stopped: RunFolder) -> None:
    place = stopped.path.parents[1]
    write(place, rows())
    done = workbench(place, "resume", "my-0001", "--detach")
    assert done.returncode == 0, done.stderr
    assert len(events(stopped, "started")) == 2


def test_the_worker_refuses_what_no_window_has_compared(stopped: RunFolder) -> None:
    """Same size and date hide the change from a look at the file; the tokens tell."""
    place = stopped.path.parents[1]
    path = place / "rows.jsonl"
    status = os.stat(path)
    path.write_text(path.read_text().replace("It is 6.", "It is 7."))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    done = workbench(place, "resume", "my-0001")
    assert done.returncode == 1
    assert "row 3 of 40 differs" in done.stderr
    assert len(events(stopped, "started")) == 1
    launch.resume(stopped, accept_data=True)
    until(lambda: len(events(stopped, "started")) == 2)


def test_a_damaged_record_is_no_reason_to_go_on_unasked(stopped: RunFolder) -> None:
    place = stopped.path.parents[1]
    (stopped.path / "data.json").write_text('{"version": 1, "splits": {"train": {}}}')
    done = workbench(place, "resume", "my-0001")
    assert done.returncode == 1
    assert "data.json" in done.stderr
    assert "Traceback" not in done.stderr
    assert workbench(place, "resume", "my-0001", "--accept-data", "--detach").returncode == 0


def test_a_run_whose_rows_another_process_prepares_says_so_and_how_far_it_is_and_can_be_stopped(
    stopped: RunFolder,
) -> None:
    # Rows that other tests of this file wrote lie there too.
    entry = cache_folder(None) / json.loads((stopped.path / "data.json").read_text())["splits"]["train"]["prepared"]
    assert entry.is_dir()
    segments = len(events(stopped, "started"))

    def waits() -> list[dict[str, Any]]:
        return [event for event in events(stopped, "progress") if "another process" in event["what"]]

    with locked(entry, lambda what, done, total: None) as report:
        launch.resume(stopped)
        until(waits)
        assert (waits()[0]["what"], waits()[0]["total"]) == ("waits: another process prepares these rows", 0)
        report("tokenizing", 1200, 24_000)
        until(lambda: waits()[-1]["done"])
        said = "waits: another process prepares these rows (tokenizing): 1,200 of 24,000"
        view = fold(RunView(), Tail(stopped.events).read())
        assert status_line(view) == f"{said} rows"
        assert doing(view) == said
        with contextlib.closing(Monitor(stopped)) as monitor:
            told = monitor.answer({"id": "1", "do": "watch", "run": stopped.id}).data
        assert told["parts"]["now"][2] == said
        assert workbench(stopped.path.parents[1], "stop", "my-0001").returncode == 0
        until(lambda: stopped.state in ENDED and not stopped.worker().alive)
    assert len(events(stopped, "started")) == segments
