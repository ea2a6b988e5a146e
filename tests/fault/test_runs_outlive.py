"""Killing windows, supervisors and workers: the run goes on, or its end is named within two seconds."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.errors import RunBusy, WorkbenchError
from engine.rules.run import BESIDE_CHECKPOINTS
from engine.run import checkpoint, control, launch, store
from engine.run.index import open_view
from engine.run.lock import is_held
from engine.run.process import Identity, identity
from engine.run.store import ENDED, RunFolder
from engine.run.tail import Tail
from engine.run.view import RunView, fold
from workbench.cli import asking
from workbench.cli.following import Follower


def until(condition, seconds=60.0):
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < seconds, "it did not happen in time"
        time.sleep(0.05)
    return time.monotonic() - begun


def over(run):
    return run.state in ENDED


def view_of(run) -> RunView:
    view, tail = RunView(), Tail(run.events)
    while events := tail.read():
        fold(view, events)
    return view


def running(run, step=3):
    until(lambda: view_of(run).step >= step and run.state == "running")
    return run


def kill(run, number=signal.SIGKILL, role="worker"):
    who = run.worker() if role == "worker" else run.supervisor()
    os.kill(who.pid, number)


def test_a_run_finishes_by_itself_and_says_so_everywhere(start):
    run = start(steps=30)
    until(lambda: over(run))
    assert (run.state, view_of(run).state, view_of(run).step) == ("finished", "finished", 30)
    assert checkpoint.step_of(checkpoint.newest_valid(run)[0]) == 30
    until(lambda: not run.supervisor().alive)
    assert not is_held(run)


@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGKILL, "was ended by SIGKILL"), (signal.SIGSEGV, "was ended by SIGSEGV"), (signal.SIGABRT, "SIGABRT")],
)
def test_a_killed_worker_is_named_within_two_seconds(start, promptly, number, words):
    run = running(start())
    kill(run, number)
    assert until(lambda: over(run)) < promptly(2)
    view = view_of(run)
    assert (run.state, view.state) == ("failed", "failed")
    assert words in view.cause
    assert words in run.read_json()["message"]
    assert not is_held(run)
    seqs = [json.loads(line)["seq"] for line in run.events.read_bytes().splitlines()]
    assert seqs == list(range(len(seqs)))


def test_a_crash_is_told_with_its_last_lines_redacted(start, tmp_path):
    run = start(raise_at=5)
    until(lambda: over(run))
    view = view_of(run)
    assert "RuntimeError: the small model broke" in view.cause
    assert "Traceback" in view.cause_lines[0]
    assert os.path.expanduser("~") + "/" not in "\n".join(view.cause_lines)


def test_children_that_a_worker_forked_do_not_keep_its_lock(start, promptly):
    run = running(start(fork_at=2), step=5)
    kill(run)
    assert until(lambda: over(run)) < promptly(4)
    assert not is_held(run)
    token = f"WORKBENCH_RUN_TOKEN={run.read_json()['token']}".encode()
    alive = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and identity(int(entry.name)) is not None:
            try:
                if token in (entry / "environ").read_bytes():
                    alive.append(entry.name)
            except OSError:
                continue
    assert alive == []


def test_a_killed_supervisor_touches_nothing_and_the_next_window_adopts_the_worker(start, promptly):
    run = running(start())
    worker, first = run.worker(), run.supervisor()
    kill(run, role="supervisor")
    until(lambda: not first.alive)
    step = view_of(run).step
    running(run, step + 5)
    assert worker.alive
    with open_view(run) as watch:
        until(lambda: watch.poll() is not None and run.supervisor() != first and run.supervisor().alive)
        assert watch.view.state == "running"
    assert run.worker() == worker
    kill(run)
    assert until(lambda: over(run)) < promptly(2)
    assert run.state == "failed"
    assert view_of(run).state == "failed"


def test_what_ended_while_nothing_watched_is_lost_and_can_go_on(start):
    run = running(start(save_steps=5), step=7)
    worker, first = run.worker(), run.supervisor()
    kill(run, role="supervisor")
    until(lambda: not first.alive)
    kill(run)
    until(lambda: not worker.alive)
    assert run.state == "running"
    assert launch.attend(run) == "lost"
    with open_view(run) as watch:
        assert (watch.view.state, "without a final word" in watch.view.cause) == ("lost", True)
    newest, _ = launch.resume(run)
    resumed = running(run, step=view_of(run).step + 5)
    assert view_of(resumed).resumed_from == checkpoint.step_of(newest)
    kill(run)


def test_a_run_that_ended_well_while_nothing_watched_is_finished(start):
    run = running(start(steps=400))
    first = run.supervisor()
    kill(run, role="supervisor")
    until(lambda: not first.alive)
    until(lambda: view_of(run).state == "finished")
    until(lambda: not run.worker().alive)
    assert launch.attend(run) == "finished"


def test_resume_names_the_checkpoint_that_a_dying_worker_had_written_but_not_named(start):
    run = running(start(save_steps=5), step=12)
    kill(run)
    until(lambda: over(run))
    newest, _ = checkpoint.newest_valid(run)
    newest.rename(newest.with_name(f"{newest.name}.tmp"))
    said, _ = launch.resume(run)
    assert said == newest
    running(run, step=checkpoint.step_of(newest) + 1)
    assert view_of(run).resumed_from == checkpoint.step_of(newest)


def test_resume_is_exact_and_marks_what_it_left(start):
    whole = start(steps=60, save_steps=10, step_seconds=0.005)
    broken = start(steps=60, save_steps=10, step_seconds=0.005, die=9, die_at=37)
    until(lambda: over(whole) and over(broken))
    assert broken.state == "failed"
    assert "exit code 9" in view_of(broken).cause
    launch.resume(broken)
    until(lambda: broken.state == "finished")
    one, other = view_of(whole), view_of(broken)
    assert one.series["loss"] == other.series["loss"]
    assert other.resumed_from == 30
    assert other.superseded == [{"segment": 1, "above": 30, "to": 37, "points": 7}]


def test_a_run_is_resumed_right_after_its_last_word_while_its_process_still_leaves(start):
    run = running(start(steps=400, leave_seconds=4))
    control.request(run, "save_stop", "me")
    until(lambda: view_of(run).state == "stopped")
    assert run.worker().alive
    newest, _ = launch.resume(run)
    until(lambda: view_of(run).segment == 1 and view_of(run).step > checkpoint.step_of(newest))


def test_a_run_that_said_its_last_word_is_asked_for_nothing_more_while_its_process_still_leaves(start):
    run = start(steps=5, leave_seconds=4)
    until(lambda: view_of(run).state == "finished")
    assert run.worker().alive
    for do in ("stop", "checkpoint"):
        with pytest.raises(WorkbenchError, match=f"run {run.id} is finished; there is nothing to ask of it"):
            asking.ask(run, do, patience=30)


def test_who_waits_for_the_end_of_a_run_waits_until_its_processes_are_gone(start):
    run = start(steps=5, leave_seconds=3)
    with open_view(run) as watch:
        assert Follower(watch, quiet=True).until(lambda view: False).state == "finished"
    assert run.state == "finished"
    assert not run.worker().alive


def test_a_living_run_is_not_resumed_and_gets_no_second_worker(start):
    run = running(start())
    with pytest.raises(RunBusy, match="is still running"):
        launch.resume(run)
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    worker = [sys.executable, "-P", "-m", "engine.worker", str(run.path)]
    said = subprocess.run(worker, capture_output=True, text=True, env=environment)
    assert "is held by process" in said.stderr
    supervisor = [sys.executable, "-P", "-m", "engine.run.supervise", "start", "--", str(run.path)]
    said = subprocess.run(supervisor, capture_output=True, text=True, env=environment)
    assert said.returncode == 3
    assert "is being started or looked after already" in said.stderr
    step = view_of(run).step
    running(run, step + 3)


def test_two_windows_launching_into_one_folder_get_two_runs(runs):
    script = (
        "import sys;from engine.run.launch import launch;"
        "print(launch('{\"steps\": 20}', runs_dir=sys.argv[1], name='same', info={}).id)"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", script, str(runs)], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    ids = sorted(process.communicate()[0].strip() for process in started)
    assert ids == ["same-0001", "same-0002", "same-0003"]
    for run in store.runs_in(runs):
        until(lambda run=run: over(run))
        assert run.state == "finished"


# -- windows ------------------------------------------------------------------------------------------------------------

WINDOW = (
    "import sys, time; from engine.run.launch import launch;"
    "run = launch('{\"steps\": 20000, \"step_seconds\": 0.01}', runs_dir=sys.argv[1], name='w', info={});"
    "print(run.path, flush=True); time.sleep(60)"
)


def opened(pid: int) -> set[str]:
    """What a process has open; what it closes while this looks is left out."""
    found = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return found


def window(runs: Path):
    """A window in a terminal of its own that launches a run; returns its pid, the terminal, and the run."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", WINDOW, str(runs)])
    said = b""
    while b"\n" not in said:
        said += os.read(terminal, 4096)
    return pid, terminal, RunFolder(said.decode().strip())


@pytest.mark.parametrize("end", ["hang up", "kill", "kill the group", "terminate"])
def test_the_run_outlives_its_window_and_its_terminal(runs, end):
    pid, terminal, run = window(runs)
    running(run)
    worker = run.worker()
    assert os.getsid(worker.pid) == worker.pid
    assert os.getsid(run.supervisor().pid) != os.getsid(pid)
    assert os.readlink(f"/proc/{worker.pid}/fd/1") == str(run.log)
    assert os.readlink(f"/proc/{worker.pid}/fd/0") == "/dev/null"
    assert not [file for file in opened(run.supervisor().pid) if "pipe" in file]
    if end == "hang up":
        os.close(terminal)
    elif end == "kill the group":
        os.killpg(pid, signal.SIGKILL)
    else:
        os.kill(pid, signal.SIGKILL if end == "kill" else signal.SIGTERM)
    os.waitpid(pid, 0)
    step = view_of(run).step
    running(run, step + 20)
    assert worker.alive
    assert run.supervisor().alive
    kill(run)
    until(lambda: over(run))


def test_a_folder_with_engine_widgets_and_torch_in_it_is_not_imported(runs, tmp_path):
    trap = tmp_path / "trap"
    for name in ("engine/__init__.py", "engine/worker.py", "widgets.py", "torch.py", "json.py", "psutil.py"):
        (trap / name).parent.mkdir(parents=True, exist_ok=True)
        (trap / name).write_text(f"open({str(trap / 'sprung')!r}, 'a').write({name!r})\n")
    launcher = [
        sys.executable,
        "-P",
        "-c",
        "import sys;from engine.run.launch import launch;print(launch('{\"steps\": 5}', runs_dir=sys.argv[1], name='t', info={}).path)",
    ]
    said = subprocess.run([*launcher, str(runs)], cwd=trap, capture_output=True, text=True, check=True)
    run = RunFolder(said.stdout.strip())
    until(lambda: over(run))
    assert run.state == "finished"
    assert not (trap / "sprung").exists()


def test_nothing_listens_on_a_port(start):
    run = running(start())
    listening = []
    for who in (run.worker(), run.supervisor()):
        inodes = opened(who.pid)
        listening += [name for name in inodes if name.startswith("socket:")]
    assert listening == []
    kill(run)


# -- requests -----------------------------------------------------------------------------------------------------------


def ask(run, do, **more):
    id = control.request(run, do, "me", **more)
    until(lambda: (view_of(run).controls.get(id) or {}).get("status") in ("done", "refused"))
    return view_of(run).controls[id]


@pytest.mark.parametrize(("do", "kept"), [("stop", False), ("save_stop", True), ("end_of_epoch", True)])
def test_stopping_keeps_what_it_says(start, do, kept):
    run = running(start(save_steps=10_000))
    assert ask(run, do)["status"] == "done"
    until(lambda: over(run))
    assert (run.state, view_of(run).state) == ("stopped", "stopped")
    newest, _ = checkpoint.newest_valid(run)
    assert (newest is not None) == kept
    if kept:
        assert checkpoint.step_of(newest) == view_of(run).step


def test_a_checkpoint_on_request_lets_the_run_go_on(start):
    run = running(start(save_steps=10_000))
    ask(run, "checkpoint")
    step = checkpoint.step_of(checkpoint.newest_valid(run)[0])
    running(run, step + 5)
    assert run.state == "running"


def test_a_request_that_is_none_is_refused_and_the_run_goes_on(start):
    run = running(start())
    (run.control / "z.json").write_bytes(b'{"id": "z", "do": "dance"}')
    until(lambda: view_of(run).controls.get("z.json", {}).get("status") == "refused")
    running(run, view_of(run).step + 3)


@pytest.mark.parametrize(("deaf", "by"), [("to requests", "SIGTERM"), ("signals too", "SIGKILL")])
def test_a_worker_that_does_not_answer_is_ended_after_the_grace_and_that_is_said(start, promptly, deaf, by):
    # Seldom awake: on busy cores one that is often awake waits for a core so much that it counts as one that computes.
    run = running(start(deaf=deaf, grace=1, step_seconds=0.3))
    id = control.request(run, "save_stop", "me")
    took = until(lambda: over(run))
    assert 1.0 <= took < promptly(6)
    view = view_of(run)
    assert view.state == "stopped"
    assert f"was ended by {by} because it did not answer within 1 s" in view.cause
    assert view.controls[id]["status"] == "done"


def test_a_save_under_way_outlasts_the_grace(start):
    run = start(save_steps=5, save_seconds=3, grace=0.5)
    until(lambda: view_of(run).checkpoints)
    control.request(run, "save_stop", "me")
    until(lambda: over(run))
    assert view_of(run).cause == "stopped by me"
    newest, skipped = checkpoint.newest_valid(run)
    assert (newest.name, skipped) == ("checkpoint-5", [])


def test_stop_now_does_not_wait_for_the_grace(start, promptly):
    run = running(start(deaf="to requests", grace=300))
    control.request(run, "stop", "me", now=True)
    assert until(lambda: over(run)) < promptly(3)
    assert "at once, as asked" in view_of(run).cause


def test_a_request_left_over_from_before_does_not_stop_the_resumed_run(start):
    run = running(start())
    kill(run)
    until(lambda: over(run))
    (run.control / "old.json").write_text(json.dumps({"id": "old", "do": "stop", "by": "x", "t": 0}))
    launch.resume(run)
    running(run, view_of(run).step + 10)
    assert run.state == "running"


def test_sigterm_to_the_worker_saves_and_stops(start):
    run = running(start(save_steps=10_000))
    kill(run, signal.SIGTERM)
    until(lambda: over(run))
    assert run.state == "stopped"
    assert view_of(run).cause == "stopped by SIGTERM"
    assert checkpoint.newest_valid(run)[0] is not None


# -- the disk -----------------------------------------------------------------------------------------------------------


def test_a_disk_without_room_is_refused_before_anything_is_made(runs):
    with pytest.raises(WorkbenchError, match=r"expected to need .*: .* for checkpoints, .* beside them"):
        launch.launch("{}", runs_dir=runs, name="x", info={"forecast_bytes": 1 << 60})
    assert list(store.runs_in(runs)) == []
    assert launch._SMALL_FILES + store.BALLAST_BYTES == BESIDE_CHECKPOINTS, (
        "`check` says before what the launch would refuse"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
@pytest.mark.parametrize("size", ["600k", "2m"])
def test_a_disk_that_fills_up_fails_the_run_in_words_and_keeps_a_whole_checkpoint(runs, tmp_path, size, monkeypatch):
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(small)], capture_output=True)
    if mounted.returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        monkeypatch.setattr(launch, "_SMALL_FILES", 0)
        monkeypatch.setattr(store, "BALLAST_BYTES", 100 << 10)
        monkeypatch.setenv("SMALL_BALLAST", str(100 << 10))
        text = json.dumps({"steps": 100_000, "step_seconds": 0, "save_steps": 50})
        run = launch.launch(text, runs_dir=small, name="full", info={})
        until(lambda: over(run), 60)
        view = view_of(run)
        assert run.state == "failed"
        assert "disk is full" in view.cause
        assert view.step > 100
        newest, _ = checkpoint.newest_valid(run)
        assert newest is not None
        until(lambda: not run.supervisor().alive)
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_a_read_only_folder_is_refused_in_one_sentence(tmp_path):
    if os.geteuid() == 0:
        place = Path("/proc/1/runs")
    else:
        place = tmp_path / "locked"
        place.mkdir(mode=0o500)
    with pytest.raises(WorkbenchError, match="runs cannot be written here"):
        launch.launch("{}", runs_dir=place, name="x", info={})


# -- file systems without locks -----------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_a_run_lives_and_ends_well_where_flock_fails(runs):
    script = "import sys;from engine.run.launch import launch;print(launch('{\"steps\": 300, \"step_seconds\": 0.01}', runs_dir=sys.argv[1], name='nfs', info={}).path, flush=True)"
    trace = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", "trace=flock", "-e", "inject=flock:error=ENOLCK"]
    process = subprocess.Popen([*trace, sys.executable, "-c", script, str(runs)], stdout=subprocess.PIPE, text=True)
    run = RunFolder(process.stdout.readline().strip())
    running(run, 2)
    assert json.loads(run.lock.read_text())["how"] == "heartbeat"
    assert is_held(run)
    until(lambda: over(run), 30)
    assert run.state == "finished"
    process.communicate()


def test_an_identity_is_more_than_a_number(start):
    run = running(start())
    worker = run.worker()
    assert not Identity(worker.pid, worker.start + 1, worker.boot, worker.host).alive
    assert not Identity(worker.pid, worker.start, "other boot", worker.host).alive
    assert not Identity(worker.pid, worker.start, worker.boot, "elsewhere").alive
