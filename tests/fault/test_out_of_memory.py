"""The kernel ends a worker that takes more memory than there is: done for real, in a memory control group, and named."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.run import checkpoint, launch
from engine.run.cause import kernel_ended
from engine.run.index import open_view
from engine.run.process import identity
from engine.run.store import ENDED, RunFolder

GROUPS = Path("/sys/fs/cgroup")
ROOM = 256 << 20
JOIN = "import os, sys; open(sys.argv[1] + '/cgroup.procs', 'w').write(str(os.getpid()));"
EAT = "eaten = []\nwhile True: eaten.append(bytearray(os.urandom(1 << 20)) * 8)"


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with room for 256 MiB; skipped where this machine or this user may not make one."""
    version_2 = (GROUPS / "cgroup.controllers").exists()
    folder = (GROUPS if version_2 else GROUPS / "memory") / f"workbench-test-{uuid.uuid4().hex[:8]}"
    limits = ["memory.max"] if version_2 else ["memory.limit_in_bytes"]
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("no control group can be made here")
    try:
        try:
            for limit in limits:
                (folder / limit).write_text(str(ROOM))
            for swap in (name for name in ("memory.swap.max",) if (folder / name).exists()):
                (folder / swap).write_text("0")
        except OSError:
            pytest.skip("control groups here do not limit memory")
        yield folder
    finally:
        end = time.monotonic() + 20
        while folder.exists() and time.monotonic() < end:
            with contextlib.suppress(OSError, ValueError):
                for pid in (folder / "cgroup.procs").read_text().split():
                    os.kill(int(pid), signal.SIGKILL)
            with contextlib.suppress(OSError):
                folder.rmdir()
            time.sleep(0.05)


def started_in(group: Path, runs: Path, **config: object) -> RunFolder:
    """A run of the small worker whose supervisor and worker live in the group."""
    script = (
        f"{JOIN} from engine.run.launch import launch;"
        "print(launch(sys.argv[3], runs_dir=sys.argv[2], name='hungry', info={}).path)"
    )
    text = json.dumps({"steps": 5000, "step_seconds": 0.01, "save_steps": 5, **config})
    said = subprocess.run(
        [sys.executable, "-c", script, str(group), str(runs), text], capture_output=True, text=True, check=True
    )
    return RunFolder(said.stdout.strip())


def wait(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def test_a_worker_that_the_kernel_ends_for_memory_is_named_so_and_can_go_on(group: Path, runs: Path) -> None:
    run = started_in(group, runs, eat_at=12)
    wait(lambda: run.state in ENDED)
    values = run.read_json()
    assert (values["state"], values["cause"], values["exit_code"]) == ("failed", "host memory", -signal.SIGKILL)
    with open_view(run) as watch:
        assert watch.view.state == "failed"
        assert "was ended by the kernel because the machine ran out of memory" in watch.view.cause
        assert "smaller batch" in watch.view.cause
    newest, skipped = checkpoint.newest_valid(run)
    assert (newest is not None, skipped) == (True, [])
    assert checkpoint.step_of(newest) == 10
    run.config.write_text(json.dumps({"steps": 20}))
    launch.resume(run)  # outside the group there is room
    wait(lambda: run.state in ENDED)
    assert run.state == "finished"


def test_the_kernels_word_on_an_adopted_worker_is_heard_too(group: Path, runs: Path, tmp_path: Path) -> None:
    if not os.access("/dev/kmsg", os.R_OK):
        pytest.skip("the kernel's log may not be read here")
    run = started_in(group, runs, eat_when=str(tmp_path / "now"))
    wait(lambda: run.state == "running")
    first = run.supervisor()
    os.kill(first.pid, signal.SIGKILL)
    wait(lambda: not first.alive)
    launch.attend(run)
    assert run.supervisor() != first
    (tmp_path / "now").touch()
    wait(lambda: run.state in ENDED)
    assert run.read_json()["cause"] == "host memory"


def test_only_the_process_that_the_kernel_ended_is_taken_for_one(group: Path) -> None:
    if not os.access("/dev/kmsg", os.R_OK):
        pytest.skip("the kernel's log may not be read here")
    hungry = subprocess.Popen(
        [sys.executable, "-c", f"{JOIN} sys.stdin.read()\n{EAT}", str(group)], stdin=subprocess.PIPE
    )
    idle = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    who, other = identity(hungry.pid), identity(idle.pid)
    hungry.communicate()
    idle.kill()
    idle.wait()
    assert hungry.returncode == idle.returncode == -signal.SIGKILL
    assert kernel_ended(who)
    assert not kernel_ended(other)


def test_the_count_of_a_control_group_grows_with_each_process_that_the_kernel_ends(group: Path) -> None:
    """What tells it where the kernel's log may not be read, as for a user who is not root."""
    script = (
        f"{JOIN} import subprocess; from engine.run.cause import oom_kills; before = oom_kills();"
        "ended = subprocess.run([sys.executable, '-c', sys.argv[2]]).returncode;"
        "print(before, ended, oom_kills())"
    )
    said = subprocess.run(
        [sys.executable, "-c", script, str(group), f"import os\n{EAT}"], capture_output=True, text=True, check=True
    )
    assert said.stdout.split() == ["0", "-9", "1"]
