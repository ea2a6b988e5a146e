"""A run folder as an attacker or an accident leaves it: nothing outside it is touched, nothing hangs, no list fails."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.run import launch
from engine.run.process import boot_id, host, identity, send
from engine.run.store import ENDED, RunFolder
from tests import warm
from tests.fault.conftest import SMALL

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
PARTS = ("control", "checkpoints", "samples", "index")
FILES = ("config.yaml", "run.json", "run.lock", "events.jsonl", "worker.log", "batches.bin", "in_flight.bin")


def until(found, seconds: float = 30.0):
    give_up = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < give_up, "it did not come"
        time.sleep(0.02)
    return value


def over(run: RunFolder) -> bool:
    gone = run.supervisor() is None or not run.supervisor().alive
    return run.state in ENDED and gone


def command(*words: str, cwd: Path, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """A command of the program as a person types it; one that hangs fails the test."""
    return warm.command(*words, cwd=cwd, timeout=timeout)


def listed(root: Path) -> dict[str, dict]:
    said = command("runs", "--runs", str(root), "--json", cwd=root)
    assert said.returncode == 0, said.stderr
    return {row["id"]: row for row in json.loads(said.stdout)}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run with two checkpoints that finished, and whose config asks for more now; each test has a copy of its own."""
    text = {"steps": 20, "step_seconds": 0.01, "save_steps": 5}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(SMALL))
        run = launch.launch(
            json.dumps(text),
            runs_dir=tmp_path_factory.mktemp("ended"),
            name="small",
            info={"method": "small", "grace_seconds": 30},
        )
        until(lambda: over(run))
    assert run.state == "finished"
    run.config.write_text(json.dumps(text | {"steps": 40}))
    return run


@pytest.fixture
def stopped(ended: RunFolder, runs: Path) -> Callable[[], RunFolder]:
    def copied() -> RunFolder:
        path = runs / f"small-{sum(1 for _ in runs.glob('small-*')) + 1:04d}"
        shutil.copytree(ended.path, path)
        return RunFolder(path)

    return copied


def tree(path: Path) -> dict[str, bytes]:
    return {str(found.relative_to(path)): found.read_bytes() for found in path.rglob("*") if found.is_file()}


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """Somebody's files, with the names that a run would delete or overwrite."""
    place = tmp_path / "precious"
    for name in ("checkpoint-20.tmp", ".trash-old", "checkpoint-3", "thesis"):
        (place / name).mkdir(parents=True)
        (place / name / "file").write_text("years of work")
    for name in ("view.bin", "rollouts.jsonl", "0001.json", "notes.txt"):
        (place / name).write_text("years of work")
    return place


@pytest.mark.parametrize("part", PARTS)
def test_resume_touches_nothing_behind_a_link_inside_the_run_folder(stopped, precious, part):
    run = stopped()
    shutil.rmtree(run.path / part)
    (run.path / part).symlink_to(precious)
    before = tree(precious)
    said = command("resume", run.id, "--changed", "--runs", str(run.path.parent), cwd=run.path.parent)
    assert tree(precious) == before
    assert said.returncode == 1
    assert re.search(rf"\b{part}:? is a symbolic link", said.stderr)
    assert "Traceback" not in said.stderr
    assert run.state == "finished"
    row = listed(run.path.parent)[run.id]
    assert row["state"] == "finished"
    assert f"{part} is a symbolic link" in row["cause"]


@pytest.mark.parametrize("part", [*PARTS, *FILES])
def test_no_process_of_a_run_follows_a_link(stopped, precious, tmp_path, part):
    """The supervisor and the worker themselves, past every check of the commands."""
    run = stopped()
    target = precious if part in PARTS else precious / "notes.txt"
    before = tree(precious)
    kept = tmp_path / "kept"
    (run.path / part).rename(kept) if (run.path / part).exists() else None
    (run.path / part).symlink_to(target)
    for argv in ([*launch.supervisor_argv(run, "start")], [sys.executable, "-P", "-m", "engine.worker", str(run.path)]):
        subprocess.run(argv, capture_output=True, timeout=60, cwd="/")
        assert tree(precious) == before
    for words in (["watch", run.id, "--json"], ["receipt", run.id], ["stop", run.id], ["compare", run.id, run.id]):
        command(*words, "--runs", str(run.path.parent), cwd=tmp_path)
        assert tree(precious) == before


def odd(kind: str, path: Path) -> None:
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero never ends
    elif kind == "socket":
        here = os.getcwd()
        os.chdir(path.parent)  # the name of a socket is short
        try:
            socket.socket(socket.AF_UNIX).bind(path.name)
        finally:
            os.chdir(here)
    else:
        path.mkdir()


KINDS = ("fifo", "device", "socket", "folder")


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["pairs", "all"])
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[AS_ROOT] * (kind == "device")) for kind in KINDS])
def test_no_command_waits_for_what_is_no_plain_file(start, stopped, tmp_path, kind, every):
    """Every file of a run in turn; a sound run beside it is listed and started as ever. One command a file by default,
    so that each has met every kind and every file, or all of them."""
    sound = stopped()
    root = sound.path.parent
    wrong = {}
    for name in FILES:
        run = RunFolder(root / f"odd-{len(wrong) + 1:04d}")
        shutil.copytree(sound.path, run.path)
        (run.path / name).unlink(missing_ok=True)
        odd(kind, run.path / name)
        wrong[run.id] = name
    rows = listed(root)
    assert rows[sound.id]["state"] == "finished"
    for id, name in wrong.items():
        assert f"{name} is not a plain file" in rows[id]["cause"], rows[id]
        assert rows[id]["state"] in ("finished", "lost")
    text = command("runs", "--runs", str(root), cwd=tmp_path)
    assert text.returncode == 0
    for number, (id, name) in enumerate(wrong.items()):
        run = RunFolder(root / id)
        calls = (["resume", id, "--changed"], ["watch", id, "--json"], ["receipt", id], ["compare", id, sound.id])
        for words in calls if every else [calls[(number + KINDS.index(kind)) % len(calls)]]:
            said = command(*words, "--runs", str(root), cwd=tmp_path)
            assert "Traceback" not in said.stderr, (name, words, said.stderr)
        argv = launch.supervisor_argv(run, "start")
        said = subprocess.run(argv, capture_output=True, text=True, timeout=60, cwd="/")
        assert said.returncode == 1
        assert f"{name} is not a plain file" in said.stderr
    another = start(5)
    until(lambda: over(another))
    assert another.state == "finished"


@pytest.mark.parametrize(
    "name", ["run.json", "events.jsonl", "worker.log", "run.lock", "control/9.json", "index/view.bin"]
)
def test_a_fifo_that_appears_while_a_run_works_keeps_nobody(start, name):
    run = start(100_000)
    until(lambda: run.state == "running")
    worker, supervisor = run.worker(), run.supervisor()
    (run.path / name).unlink(missing_ok=True)
    os.mkfifo(run.path / name)
    listed(run.path.parent)
    send(worker, signal.SIGTERM)
    until(lambda: not worker.alive)
    until(lambda: not supervisor.alive)


@AS_ROOT
@pytest.mark.parametrize("name", ["config.yaml", "checkpoints", "events.jsonl"])
def test_what_belongs_to_another_person_is_not_taken_for_the_runs(stopped, name):
    run = stopped()
    os.chown(run.path / name, 12345, 12345)
    said = command("resume", run.id, "--changed", "--runs", str(run.path.parent), cwd=run.path.parent)
    assert said.returncode == 1
    assert name in said.stderr
    assert "does not belong to the owner of the run" in said.stderr


@AS_ROOT
def test_others_whom_the_permissions_let_read_may_watch(stopped, tmp_path):
    run = stopped()
    for found in (run.path, *run.path.rglob("*")):
        os.chown(found, 12345, 12345)
        found.chmod(0o755 if found.is_dir() else 0o644)
    row = listed(run.path.parent)[run.id]
    assert (row["state"], row["step"], row["cause"]) == ("finished", 20, None)


def test_a_file_with_a_second_name_elsewhere_is_not_written(stopped, tmp_path):
    run = stopped()
    run.log.unlink()
    (tmp_path / "elsewhere").write_text("mine")
    os.link(tmp_path / "elsewhere", run.log)
    subprocess.run(launch.supervisor_argv(run, "start"), capture_output=True, timeout=60)
    assert (tmp_path / "elsewhere").read_text() == "mine"


# -- whom a run folder may have signalled --------------------------------------------------------------------------------


@contextmanager
def victim(token: str = "") -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", "import time;time.sleep(600)"],
        env={**os.environ, **({"WORKBENCH_RUN_TOKEN": token} if token else {})},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def forged(run: RunFolder, pid: int, **changes: object) -> None:
    """run.json as if this process were the run's worker."""
    who = identity(pid)
    here = os.stat(run.path)
    values = json.loads(run.json.read_text()) | {
        "state": "running", "worker_pid": pid, "worker_start": who.start, "boot_id": boot_id(), "host": host(),
        "supervisor_pid": 2**22 + 7, "supervisor_start": 1, "grace_seconds": 0.2, "folder": [here.st_dev, here.st_ino],
        "token": "0" * 32,
    }  # fmt: skip
    run.json.write_text(json.dumps(values | changes))
    lines = run.events.read_text().splitlines(keepends=True)
    run.events.write_text("".join(line for line in lines if '"finished"' not in line))


def test_a_forged_folder_has_nobody_signalled(stopped):
    token = "a" * 32
    lies = {
        "stranger": {},
        "no token": {"token": ""},
        "no folder": {"folder": None},
        "right token, no lock": {"token": token},
        "right token, other folder": {"token": token, "folder": [1, 2]},
    }
    runs = {lie: stopped() for lie in lies}
    with contextlib.ExitStack() as stack:
        victims = {lie: stack.enter_context(victim(token)) for lie in lies}
        attending = []
        for lie, changes in lies.items():
            forged(runs[lie], victims[lie].pid, **changes)
            body = {"v": 1, "id": "x", "t": 0, "do": "stop", "by": "me", "now": True}
            (runs[lie].control / "x.json").write_text(json.dumps(body))
            attending.append(launch.attend_soon(runs[lie]))
        for each in attending:
            each.wait(30)
        time.sleep(7)  # past SIGTERM and the SIGKILL after it
        for lie in lies:
            assert victims[lie].poll() is None, lie
            if "right token" not in lie:
                assert runs[lie].state == "lost", lie
    for run in runs.values():
        until(lambda run=run: run.supervisor() is None or not run.supervisor().alive)


def test_stopping_a_copied_folder_leaves_the_original_at_work(start, tmp_path):
    run = start(100_000)
    until(lambda: run.state == "running")
    copied = RunFolder(run.path.with_name("copied-0001"))
    at_work = (run.supervisor(), run.worker())
    for each in at_work:  # a run that saves while it is copied would take files away from under the copy
        os.kill(each.pid, signal.SIGSTOP)
    shutil.copytree(run.path, copied.path)
    for each in at_work:
        os.kill(each.pid, signal.SIGCONT)
    (copied.path / "control" / "x.json").write_text(json.dumps({"id": "x", "do": "stop", "now": True}))
    said = command("stop", copied.id, "--now", "--runs", str(run.path.parent), cwd=tmp_path)
    assert said.returncode == 1
    assert "is lost" in said.stderr
    time.sleep(1)
    assert run.worker().alive
    assert run.supervisor().alive
    rows = listed(run.path.parent)
    assert (rows[run.id]["state"], rows[copied.id]["state"]) == ("running", "lost")
    assert "copy" in rows[copied.id]["cause"]
    resumed = command("resume", copied.id, "--detach", "--runs", str(run.path.parent), cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    until(lambda: copied.state == "running")
    assert run.worker().alive


def test_a_worker_that_lost_its_supervisor_is_still_ended_at_once(start, tmp_path):
    """The proof is no hindrance to the rightful owner."""
    run = start(100_000, deaf="signals too")
    until(lambda: run.state == "running")
    os.kill(run.supervisor().pid, signal.SIGKILL)
    worker = run.worker()
    said = command("stop", run.id, "--now", "--runs", str(run.path.parent), cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    assert not worker.alive
    assert run.state == "stopped"


# -- room for the last word -------------------------------------------------------------------------------------------------


def reserved(run: RunFolder) -> int:
    """Bytes that the run holds on the disk beside what it wrote."""
    return sum(found.stat().st_blocks * 512 for found in run.path.rglob(".ballast"))


@contextmanager
def mounted(place: Path, size: str) -> Iterator[Path]:
    place.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], capture_output=True
    ).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path) -> Path:
    """Takes all the room that is left."""
    path = place / "others"
    with open(path, "ab", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while file.write(b"x" * size):
                    continue
            except OSError:
                continue
    return path


def test_a_run_at_work_holds_64_mib_and_frees_them_at_its_end(start):
    run = start(100_000, save_steps=10)
    until(lambda: run.state == "running")
    assert reserved(run) == 64 << 20
    send(run.worker(), signal.SIGTERM)
    until(lambda: over(run))
    assert reserved(run) == 0
    launch.resume(run)
    until(lambda: run.state == "running")
    assert reserved(run) == 64 << 20
    os.kill(run.worker().pid, signal.SIGKILL)
    until(lambda: over(run))
    assert reserved(run) == 0


@AS_ROOT
def test_a_disk_that_fills_up_twice_keeps_the_cause_each_time(start, tmp_path):
    with mounted(tmp_path / "small", "150m") as small:
        text = json.dumps({"steps": 1_000_000, "step_seconds": 0.001, "save_steps": 50})
        run = launch.launch(text, runs_dir=small, name="full", info={})
        for _ in range(3):
            until(lambda: run.state == "running")
            until(lambda: RunFolder(run.path).events.stat().st_size > 20_000)
            others = fill(small)
            until(lambda: over(run), 60)
            values = run.read_json()
            assert (values["state"], values["cause"]) in (("failed", "disk full"), ("failed", "error"))
            row = listed(small)[run.id]
            assert row["state"] == "failed"
            assert "the disk is full" in row["cause"]
            others.unlink()
            launch.resume(run)
        send(run.worker(), signal.SIGTERM)
        until(lambda: over(run))


@AS_ROOT
def test_a_run_that_cannot_be_looked_after_is_a_row_that_says_so(start, tmp_path):
    """Its supervisor and its worker died on a disk without a byte: no other run is hidden by it."""
    with mounted(tmp_path / "small", "300m") as small:
        text = json.dumps({"steps": 1_000_000, "step_seconds": 0.01})
        run = launch.launch(text, runs_dir=small, name="full", info={})
        until(lambda: run.state == "running")
        other = launch.launch(json.dumps({"steps": 3, "step_seconds": 0.01}), runs_dir=small, name="other", info={})
        until(lambda: over(other))
        worker, supervisor = run.worker(), run.supervisor()
        os.kill(supervisor.pid, signal.SIGKILL)
        os.kill(worker.pid, signal.SIGKILL)
        until(lambda: not worker.alive and not supervisor.alive)
        next(run.path.rglob(".ballast")).unlink()
        fill(small)
        rows = listed(small)
        assert rows[other.id]["state"] == "finished"
        assert rows[run.id]["state"] == "lost"
        assert "No space left" in rows[run.id]["cause"] or "disk is full" in rows[run.id]["cause"]
        said = command("watch", run.id, "--json", "--runs", str(small), cwd=tmp_path)
        assert "Traceback" not in said.stderr
        assert json.loads(said.stdout)["state"] == "lost"


@AS_ROOT
def test_a_resume_without_room_for_the_last_word_is_refused_and_changes_nothing(start, tmp_path):
    with mounted(tmp_path / "small", "150m") as small:
        text = json.dumps({"steps": 20, "step_seconds": 0.01, "save_steps": 5, "die": 7, "die_at": 12})
        run = launch.launch(text, runs_dir=small, name="full", info={})
        until(lambda: over(run))
        before = run.read_json()
        (small / "others").write_bytes(bytes(110 << 20))
        said = command("resume", run.id, "--runs", str(small), cwd=tmp_path)
        assert said.returncode == 1
        assert "the disk is full: 64.0 MiB needed" in said.stderr
        after = run.read_json()
        assert {key: after[key] for key in ("state", "cause", "message")} == {
            key: before[key] for key in ("state", "cause", "message")
        }
        assert reserved(run) == 0


# -- limits and failing disks -------------------------------------------------------------------------------------------------


def limited(run: RunFolder, script: str, *, size: int | None = None, inject: str = "", at: str = "") -> str:
    """What a small program with this run says on stderr, under a limit or with the file `at` on a disk that fails."""
    argv = [sys.executable, "-c", script, str(run.path)]
    if inject:
        only = ["-P", str(run.checkpoints / at)] if at else []
        calls = ["-e", "trace=write,fsync,ftruncate", "-e", f"inject={inject}"]
        argv = ["strace", "-f", "-qq", "-o", "/dev/null", *only, *calls, *argv]

    def limit() -> None:
        if size is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    done = subprocess.run(argv, capture_output=True, text=True, preexec_fn=limit, timeout=120)
    assert done.returncode == 1
    return done.stderr


SAVE = """
import sys
from engine.errors import WorkbenchError
from engine.run import checkpoint
from engine.run.store import RunFolder
import numpy
from safetensors.numpy import save_file
run = RunFolder(sys.argv[1])
tmp = checkpoint.begin(run, 5)
try:
    try:
        FILES
    except Exception as problem:
        raise checkpoint.without_room(tmp, problem, PART) or problem
    checkpoint.commit(tmp, {})
except WorkbenchError as problem:
    sys.exit(f"{problem.cause} | {problem.full_message}")
"""
SAFETENSORS = 'save_file({"a": numpy.zeros(1_000_000, "float32")}, str(tmp / "model.safetensors"))'
TORCH = "import torch; torch.save({'a': torch.zeros(1_000_000)}, tmp / 'optimizer.pt')"
PLAIN = '(tmp / "state.json").write_text("x" * 3_000_000)'


WEIGHTS = "model.safetensors"


@pytest.mark.parametrize(
    ("files", "name", "part"),
    [(SAFETENSORS, "/model.safetensors", WEIGHTS), (TORCH, "/optimizer.pt", ""), (PLAIN, "/state.json", "")],
)
def test_a_limit_on_the_length_of_a_file_is_named_with_the_file(stopped, files, name, part):
    run = stopped()
    said = limited(run, SAVE.replace("FILES", files).replace("PART", repr(part)), size=1 << 20)
    assert said.startswith("file size limit | ")
    assert "a file may not grow beyond 1.0 MiB here (RLIMIT_FSIZE)" in said
    assert f"checkpoint-5.tmp{name}:" in said
    assert "more than 1.0 MiB needed" in said
    assert "disk is full" not in said
    assert not list(run.checkpoints.glob("*.tmp"))
    assert not list(run.checkpoints.glob(".*"))


ERRORS = {
    "EDQUOT": ("disk quota", "the disk quota is used up"),
    "EIO": ("disk error", "the disk reports an input/output error"),
    "EROFS": ("disk read-only", "the file system is read-only now"),
}
PLACES = {
    "weights": (SAFETENSORS, "", "ftruncate"),
    "weights made durable": (SAFETENSORS, "checkpoint-5.tmp/model.safetensors", "fsync"),
    "state": (PLAIN, "checkpoint-5.tmp/state.json", "write"),
    "commit": (PLAIN, "checkpoint-5.tmp/COMMIT.json", "write"),
    "folder": (PLAIN, "checkpoint-5.tmp", "fsync"),
}


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize(
    ("place", "error"),
    [
        pytest.param(place, error, marks=() if number % len(ERRORS) == which else pytest.mark.slow)
        for number, place in enumerate(PLACES)
        for which, error in enumerate(ERRORS)
    ],
)
def test_quotas_and_failing_disks_are_named_as_what_they_are(stopped, place, error):
    run = stopped()
    (cause, words), (files, at, call) = ERRORS[error], PLACES[place]
    part = WEIGHTS if files == SAFETENSORS else ""
    script = SAVE.replace("FILES", files).replace("PART", repr(part))
    said = limited(run, script, inject=f"{call}:error={error}:when=1+", at=at)
    assert said.startswith(f"{cause} | "), said
    assert words in said
    assert str(run.checkpoints / "checkpoint-5.tmp" / part) in said
    assert "disk is full" not in said
    assert not list(run.checkpoints.glob("*.tmp"))


def test_a_run_under_a_limit_says_so_in_its_row(start, runs):
    """The whole way: the launcher is limited, so is its run, and the list says what it met."""
    script = (
        "import resource,sys,json;resource.setrlimit(resource.RLIMIT_FSIZE,(40_000,40_000));from engine.run import launch;"
        "print(launch.launch(json.dumps({'steps':100000,'step_seconds':0}),runs_dir=sys.argv[1],name='limited',info={}).path)"
    )
    said = subprocess.run([sys.executable, "-c", script, str(runs)], capture_output=True, text=True)
    run = RunFolder(said.stdout.strip())
    until(lambda: over(run), 60)
    row = listed(runs)[run.id]
    assert row["state"] == "failed"
    assert "a file may not grow beyond 39.1 KiB here (RLIMIT_FSIZE)" in row["cause"]
