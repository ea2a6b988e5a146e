"""A run in a container, without docker: first process of its own namespaces, a user that nobody knows, nothing but its folder to
write into. A rank is killed, the run goes on; so it does without its supervisor, of which no zombie is left; SIGTERM saves and ends it with 143."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.run import checkpoint
from engine.run.store import RunFolder, runs_in

CONFIG = """
version: 1
model: {name: builtin/tiny, dtype: float32}
data: {train: [{path: builtin/dates}], max_length: 128}
optim: {per_device_train_batch_size: 2, gradient_accumulation_steps: 1, max_steps: 100000}
run: {devices: 2, save_steps: 5, max_restarts: 2, grace_seconds: 120}
"""
BUILD = """
set -e
mount --make-rprivate /
mount --bind "$PLACE" "$PLACE"
mount -t tmpfs -o size=1m none /dev/shm
mount -o remount,bind,ro /
exec env -u HOME -u USER -u LOGNAME unshare --user --map-user=12345 --map-group=12345 "$@"
"""
NAMESPACES = ["unshare", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]


def lacks() -> str:
    """Why there can be no container here; empty where there can."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return "making namespaces needs root and unshare"
    probe = ["sh", "-c", BUILD, "sh", "true"]
    done = subprocess.run([*NAMESPACES, *probe], env={**os.environ, "PLACE": "/tmp"}, capture_output=True, text=True)
    return "" if done.returncode == 0 else f"needs root that may make namespaces: {done.stderr.strip()}"


def until(done: Callable[[], object], process: subprocess.Popen[str], log: Path, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.2)


def events(run: RunFolder, kind: str) -> list[dict[str, object]]:
    lines = run.events.read_text().splitlines() if run.events.exists() else []
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def inside(first: int) -> dict[int, tuple[str, str]]:
    """The processes of the container by number here, with state and command line; those of its first one's PID namespace."""
    own = os.readlink(f"/proc/{first}/ns/pid")
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{name}/ns/pid") == own:
                state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
                found[int(name)] = state, Path(f"/proc/{name}/cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_in_a_container_survives_a_rank_and_saves_when_it_is_told_to_end(tmp_path: Path) -> None:
    if why := lacks():
        pytest.skip(why)
    place = tmp_path / "volume"
    (place / "tmp").mkdir(parents=True)
    (place / "my.yaml").write_text(CONFIG)
    log = tmp_path / "log"
    given = {
        "PLACE": place,
        "WORKBENCH_CACHE": place / "cache",
        "TMPDIR": place / "tmp",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    train = [sys.executable, "-m", "workbench", "train", place / "my.yaml", "--resume", "--runs", place / "runs"]

    def begin() -> subprocess.Popen[str]:
        with log.open("w") as out:
            return subprocess.Popen(
                [*NAMESPACES, "sh", "-c", BUILD, "sh", *map(str, train)],
                env={**os.environ, **{name: str(value) for name, value in given.items()}},
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, text=True,
            )  # fmt: skip

    process = begin()
    try:
        until(lambda: list(runs_in(place / "runs")), process, log)
        (run,) = runs_in(place / "runs")
        until(lambda: events(run, "metrics"), process, log)
        assert f"there is no home folder: caches go to {place}/cache/home-12345." in log.read_text()
        # From outside it is seen to live, though its processes have other numbers here.
        assert run.state == "running"
        assert run.worker() is not None
        assert not run.worker().here
        (first,) = (int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
        ranks = [
            pid for pid, (_, words) in inside(first).items() if "engine.worker" in words and "torchrun" not in words
        ]
        assert len(ranks) == 2
        os.kill(max(ranks), signal.SIGKILL)
        until(lambda: len(events(run, "started")) == 2, process, log)
        until(lambda: [each for each in events(run, "metrics") if each["segment"] == 1], process, log)
        assert "was ended by SIGKILL. It is started again from" in str(events(run, "restart")[0]["message"])
        # Its supervisor ends with nobody but the first process to take note, which brings another.
        (watches,) = (pid for pid, (_, words) in inside(first).items() if "engine.run.supervise" in words)
        before = run.supervisor()
        os.kill(watches, signal.SIGKILL)
        until(lambda: run.supervisor() != before, process, log)
        until(lambda: not [words for state, words in inside(first).values() if state == "Z"], process, log, seconds=20)
        os.kill(first, signal.SIGTERM)
        assert process.wait(120) == 128 + signal.SIGTERM, log.read_text()
    finally:
        process.kill()
        process.wait()
    assert run.state == "stopped"
    newest, skipped = checkpoint.newest_valid(run)
    assert skipped == []
    assert checkpoint.step_of(newest) == events(run, "stopped")[0]["step"]
    # The same command in a container that is started anew goes on with it, also where the last one was cut off.
    for starts in (3, 4):
        process = begin()
        try:
            until(lambda starts=starts: len(events(run, "started")) == starts, process, log)
            assert f"{run.id} goes on from step " in log.read_text()
        finally:
            process.kill()
            process.wait()
    assert [each.id for each in runs_in(place / "runs")] == [run.id]
