"""The commands around a run, as processes: exit codes, what is printed where, what a signal does."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from engine.errors import Cancelled, UsageError, WorkbenchError
from engine.run import launch, store
from engine.run.events import EventWriter
from engine.run.in_flight import InFlight
from engine.run.index import open_view, peek
from engine.run.stop_requests import LONG_STEP_SECONDS
from engine.run.store import ENDED, RunFolder, create
from engine.run.view import RunView
from tests import warm
from workbench.__main__ import cli
from workbench.cli import following, stop, train
from workbench.cli.following import Follower
from workbench.cli.runs import command as runs_command

CONFIG = """\
version: 1
model: {name: builtin/tiny, dtype: float32}
data: {train: [{path: builtin/dates}], max_length: 128}
optim: {max_steps: 60}
run: {save_steps: 20, grace_seconds: 5, devices: 1}
"""
STEP_SECONDS = 0.01


def workbench(place, *words):
    return warm.command(*words, cwd=place)


def long(monkeypatch, **more):
    monkeypatch.setenv("SMALL_WORKER", json.dumps({"step_seconds": 0.02, "steps": 5000, "save_steps": 5000, **more}))


def only_run(place) -> RunFolder:
    (run,) = store.runs_in(place / "runs")
    return run


def until(condition, seconds=60.0):
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < seconds, "it did not happen in time"
        time.sleep(0.02)


def test_train_runs_to_the_end_and_the_other_commands_know_it(place):
    done = workbench(place, "train", "my.yaml")
    assert done.returncode == 0, done.stderr
    assert "✓ finished: my-0001, 60 steps" in done.stderr
    assert done.stdout == ""
    (listed,) = json.loads(workbench(place, "runs", "--json").stdout)
    keys = {
        "id",
        "state",
        "method",
        "model",
        "step",
        "max_steps",
        "loss",
        "reward",
        "started",
        "ended",
        "cause",
        "cause_kind",
        "best",
        "diverged_at",
        "restarts",
        "silent_seconds",
    }
    assert set(listed) == keys
    assert (listed["id"], listed["state"], listed["step"], listed["max_steps"]) == ("my-0001", "finished", 60, 60)
    assert listed["ended"] >= listed["started"]
    assert "my-0001" in workbench(place, "runs").stdout
    watched = workbench(place, "watch", "my-0001", "--json")
    assert len(json.loads(watched.stdout)["series"]["loss"]) == 60
    assert workbench(place, "watch", "my-0001").returncode == 0
    for words in (("stop", "my-0001"), ("checkpoint", "my-0001"), ("resume", "my-0001")):
        refused = workbench(place, *words)
        assert refused.returncode == 1
        assert "finished" in refused.stderr
        assert "Traceback" not in refused.stderr
    with pytest.raises(WorkbenchError, match="nothing left to go on with") as refusal:
        launch.resume(only_run(place))  # as the app and the notebook ask
    # From here the run lies elsewhere, so that its folder names it.
    assert f"`workbench resume {only_run(place).path} --set optim." in refusal.value.full_message
    receipt = json.loads(workbench(place, "receipt", "my-0001", "--json").stdout)
    assert receipt == {"id": "my-0001", "state": "finished", "entries": []}


def test_train_json_and_overrides_and_runs_are_relative_to_where_one_stands(place, tmp_path):
    (place / "sub").mkdir()
    done = workbench(
        place / "sub", "train", "../my.yaml", "--json", "--runs", "here", "optim.max_steps=20", "run.name=Other one"
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["id"], said["state"], said["max_steps"]) == ("other-one-0001", "finished", 20)
    text = (place / "sub" / "here" / "other-one-0001" / "config.yaml").read_text()
    assert "max_steps: 20" in text
    assert "auto" not in [line.split(": ")[-1] for line in text.splitlines()]


def test_a_bad_config_starts_nothing_and_says_all_of_it(place):
    (place / "my.yaml").write_text(CONFIG.replace("max_steps", "max_stebs").replace("float32", "float33"))
    done = workbench(place, "train", "my.yaml")
    assert done.returncode == 1
    assert "optim.max_stebs" in done.stderr
    assert "float33" in done.stderr
    assert "no run was started" in done.stderr
    assert not (place / "runs").exists()
    assert workbench(place, "train", "nothing.yaml").returncode == 2
    assert workbench(place, "train").returncode == 2


def test_a_run_that_has_finished_but_whose_process_is_still_going_is_not_gone_on_with(place, monkeypatch):
    monkeypatch.setenv("SMALL_WORKER", '{"step_seconds": 0.001, "steps": 3, "save_steps": 3, "leave_seconds": 1.5}')
    watching = subprocess.Popen([sys.executable, "-P", "-m", "workbench", "train", "my.yaml"], cwd=place)
    until(lambda: any(peek(run).view.state == "finished" for run in store.runs_in(place / "runs")))
    assert only_run(place).state != "finished", "its process is still there"
    refused = workbench(place, "resume", "my-0001")
    assert watching.wait(20) == 0
    assert (refused.returncode, "there is nothing left to go on with" in refused.stderr) == (1, True), refused.stderr


@pytest.mark.parametrize(("made", "got"), [("folder", None), ("file", "a file"), ("nothing", "nothing there")])
def test_a_folder_of_runs_that_does_not_exist_is_bad_input(tmp_path, made, got):
    place = tmp_path / "those"
    if made == "folder":
        place.mkdir()
    elif made == "file":
        place.write_text("")
    done = CliRunner().invoke(runs_command, ["--runs", str(place)], standalone_mode=False)
    if got is None:
        assert done.return_value == 0
        assert f"No runs in {place}" in done.output
    else:
        assert isinstance(done.exception, UsageError)
        assert (
            done.exception.message == f"--runs: must be a folder that holds runs; got {got}: {place}. Check the path."
        )
        assert done.exception.exit_code == 2


def test_the_folder_of_runs_can_stand_before_the_command_and_before_a_run(tmp_path):
    def said(*words):
        return CliRunner().invoke(cli, ["--runs", str(tmp_path), *words], standalone_mode=False)

    assert f"No runs in {tmp_path}" in said("runs").output
    for words in (("no-such-0001",), ("watch", "no-such-0001")):
        assert str(tmp_path) in str(said(*words).exception.full_message), words
    wrong = said("check", "my.yaml").exception
    assert "--runs: must be left out with `check`" in wrong.message


def test_a_failed_run_gives_1_and_its_cause(place, monkeypatch):
    long(monkeypatch, raise_at=3)
    done = workbench(place, "train", "my.yaml")
    assert done.returncode == 1
    assert "RuntimeError: the small model broke" in done.stderr
    assert "✗ failed at step 3" in done.stderr
    assert workbench(place, "watch", "my-0001").returncode == 1
    assert "the small model broke" in workbench(place, "runs").stdout


def test_a_failed_run_tells_its_memory_over_time_and_the_rows_it_was_on(tmp_path):
    run = store.create(tmp_path, "version: 1\n", {"name": "my", "host": "another-machine"})
    with EventWriter(run) as pen:
        pen.write("started", method="sft", model="builtin/tiny", max_steps=20, epochs=1)
        for step in (1, 2):
            pen.write("metrics", step=step, loss=2.0, memory_allocated=step << 30)
        InFlight(run).note(3, [17, 4])
        pen.write("failed", cause="cuda_oom", message="The GPU ran out of memory.", lines=[])
    run.update_json(state="failed")
    said = CliRunner().invoke(cli, ["watch", run.id, "--runs", str(tmp_path)], standalone_mode=False)
    assert "memory         1.0 GiB at step 1, 2.0 GiB at step 2" in said.stderr
    assert "in flight      step 3: rows 17, 4" in said.stderr


def test_detach_returns_once_training_has_begun_and_the_run_is_stopped_and_resumed_later(place, monkeypatch):
    long(monkeypatch, steps=300)
    done = workbench(place, "train", "my.yaml", "--detach", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["state"] == "running"
    saved = workbench(place, "checkpoint", "my-0001", "--json")
    assert saved.returncode == 0, saved.stderr
    assert json.loads(saved.stdout)["step"] > 0
    stopped = workbench(place, "stop", "my-0001", "--save")
    assert stopped.returncode == 0, stopped.stderr
    assert "Kept: the checkpoint of step" in stopped.stdout
    monkeypatch.setenv("SMALL_WORKER", '{"steps": 300}')
    resumed = workbench(place, "resume", "my-0001", "run.save_steps=40", "--set", "optim.learning_rate=0.5")
    assert resumed.returncode == 0, resumed.stderr
    config = only_run(place).read_config()
    assert ("save_steps: 40" in config, "learning_rate: 0.5" in config) == (True, True), config
    assert "my-0001 goes on from step" in resumed.stderr
    assert "✓ finished: my-0001, 300 steps" in resumed.stderr


def test_the_same_command_goes_on_with_the_run_that_it_began(place, monkeypatch):
    """As a container's does each time it starts: cut off with all in it, ended by a signal, done."""
    long(monkeypatch, steps=400, save_steps=20)
    again = [sys.executable, "-P", "-m", "workbench", "train", "my.yaml", "--resume"]
    with subprocess.Popen(again, cwd=place, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as first:
        until(lambda: list(store.runs_in(place / "runs")) and peek(only_run(place)).view.committed)
        run = only_run(place)
        for who in (first.pid, run.supervisor().pid, run.worker().pid):
            os.kill(who, signal.SIGKILL)
        assert f"no run of my.yaml is in {place / 'runs'}: one is started" in first.stderr.read()
    other = workbench(place, *again[4:], "optim.learning_rate=0.5")
    assert other.returncode == 1
    assert "changed: optim.learning_rate: " in other.stderr
    assert "my.yaml: its run my-0001 has another config, see above." in other.stderr
    with subprocess.Popen(again, cwd=place, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as second:
        until(lambda: peek(run).view.segment == 1 and run.state == "running")
        second.send_signal(signal.SIGTERM)
        said = second.stderr.read()
    assert second.returncode == 143, said
    assert "my-0001 goes on from step " in said
    monkeypatch.setenv("SMALL_WORKER", '{"steps": 400}')
    third = workbench(place, *again[4:])
    assert (third.returncode, "my-0001 goes on from step " in third.stderr) == (0, True), third.stderr
    assert "✓ finished: my-0001, 400 steps" in third.stderr
    done = workbench(place, *again[4:])
    assert (done.returncode, "my-0001 is finished; nothing is started" in done.stderr) == (0, True), done.stderr
    assert only_run(place).id == run.id


def test_plain_stop_says_what_is_kept(place, monkeypatch):
    long(monkeypatch)
    assert workbench(place, "train", "my.yaml", "--detach").returncode == 0
    stopped = workbench(place, "stop", "my-0001")
    assert stopped.returncode == 0, stopped.stderr
    assert "Kept: no checkpoint." in stopped.stdout
    assert workbench(place, "stop", "my-0001", "--save", "--now").returncode == 2


def test_stop_now_ends_a_worker_that_hangs(place, monkeypatch):
    long(monkeypatch, deaf="signals too")
    assert workbench(place, "train", "my.yaml", "--detach").returncode == 0
    begun = time.monotonic()
    assert workbench(place, "stop", "my-0001", "--now").returncode == 0
    assert time.monotonic() - begun < 60  # such a worker would never end by itself
    assert only_run(place).state == "stopped"


def test_resume_says_which_checkpoint_it_skipped_and_refuses_changed_settings(place, monkeypatch):
    long(monkeypatch, steps=200, save_steps=20, die=9, die_at=75)
    assert workbench(place, "train", "my.yaml").returncode == 1
    run = only_run(place)
    (run.checkpoints / "checkpoint-60" / "state.json").write_text("{}")
    config = run.config.read_text()
    run.config.write_text(config.replace("seed: 42", "seed: 43"))
    refused = workbench(place, "resume", run.id)
    assert refused.returncode == 1
    assert "changed: run.seed: 42 -> 43" in refused.stderr
    run.config.write_text(config)
    resumed = workbench(place, "resume", run.id)
    assert resumed.returncode == 0, resumed.stderr
    assert "skipped checkpoint-60: state.json has 2 bytes" in resumed.stderr
    assert "goes on from step 40" in resumed.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_without_a_terminal_a_signal_saves_and_stops(place, monkeypatch, number, code):
    long(monkeypatch)
    argv = [sys.executable, "-P", "-m", "workbench", "train", "my.yaml", "--json"]
    process = subprocess.Popen(
        argv, cwd=place, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    until(lambda: list(store.runs_in(place / "runs")) and only_run(place).state == "running")
    process.send_signal(number)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == code
    assert json.loads(out)["state"] == "stopped"
    assert (only_run(place).checkpoints / f"checkpoint-{json.loads(out)['step']}").is_dir()


def test_without_a_terminal_a_killed_command_leaves_the_run_alone(place, monkeypatch):
    long(monkeypatch, steps=200)
    argv = [sys.executable, "-P", "-m", "workbench", "train", "my.yaml"]
    process = subprocess.Popen(argv, cwd=place, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: list(store.runs_in(place / "runs")) and only_run(place).state == "running")
    process.kill()
    process.wait()
    until(lambda: only_run(place).state == "finished")


def test_with_a_terminal_ctrl_c_asks_and_leaves_the_run_going(place, monkeypatch):
    long(monkeypatch)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(place)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell that put the tests in the background ignores it
        os.execv(sys.executable, [sys.executable, "-P", "-m", "workbench", "train", "my.yaml"])
    said = b""

    def read_until(words: bytes) -> None:
        nonlocal said
        give_up = time.monotonic() + 30
        while words not in said:
            assert time.monotonic() < give_up, said
            said += os.read(terminal, 4096)

    read_until(b"loss")
    os.write(terminal, b"\x03")
    read_until(b"go on watching")
    read_until(b"[l]:")
    os.write(terminal, b"\r")
    read_until(b"workbench watch my-0001` shows it")
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 0
    assert only_run(place).worker().alive
    until(lambda: only_run(place).state == "running")  # run.json follows the curves at the supervisor's next look


def test_a_list_tells_the_truth_about_a_run_that_nobody_watched(place, monkeypatch):
    long(monkeypatch)
    assert workbench(place, "train", "my.yaml", "--detach").returncode == 0
    run = only_run(place)
    for who in (run.supervisor(), run.worker()):
        os.kill(who.pid, signal.SIGKILL)
        until(lambda who=who: not who.alive)
    (listed,) = json.loads(workbench(place, "runs", "--json").stdout)
    assert listed["state"] == "lost"
    assert "without a final word" in listed["cause"]
    assert run.state in ENDED


def test_names_with_escapes_and_unknown_runs_are_one_sentence(place):
    done = workbench(place, "watch", "\x1b]0;title\x07nope")
    assert done.returncode == 2
    assert "\x1b" not in done.stderr
    assert "no run is called" in done.stderr
    assert workbench(place, "runs").returncode == 0
    assert workbench(place, "runs", "--json").stdout.strip() == "[]"


def test_a_receipt_is_shown_as_a_table_without_escapes(place):
    run = store.create(place / "runs", "version: 1\n", {"name": "x"})
    run.update_json(state="finished")
    event = {"v": 1, "seq": 0, "t": 1.0, "rank": 0, "segment": 0, "kind": "receipt"}
    entry = {
        "feature": "attention",
        "requested": "auto",
        "effective": "\x1b[31msdpa",
        "count": 28,
        "detail": "28 of 28",
    }
    run.events.write_text(json.dumps(event | {"entries": [entry]}) + "\n")
    out = workbench(place, "receipt", "x-0001").stdout
    assert "attention" in out
    assert "28 of 28" in out
    assert "\x1b" not in out


def test_the_commands_import_no_torch(place):
    script = "import sys; from workbench.__main__ import COMMANDS; from importlib import import_module; [import_module('workbench.cli.' + n) for n in ('train','runs','watch','stop','checkpoint','resume','receipt','demo')]; print(sorted({'torch','transformers','datasets','numpy','textual'} & set(sys.modules)))"
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=place, check=True)
    assert said.stdout.strip() == "[]"


def test_who_follows_a_run_is_told_of_the_slowest_rank_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(launch, "unattended", lambda run: False)
    run = create(tmp_path, "version: 1\n", {"name": "four", "method": "sft", "model": "builtin/tiny"})
    run.update_json(state="running")
    writer = EventWriter(run)
    writer.write("started", method="sft", max_steps=9, world_size=4)
    writer.write("metrics", step=1, step_seconds=0.4)
    for step in (1, 2):
        writer.write("ranks", step=step, data_seconds=[0, 0, 0.1 * step, 0], forward_seconds=[0.1] * 4)
    with open_view(run) as watch:
        follower = Follower(watch)
        follower.until(lambda view: True)
        writer.write("ranks", step=3, data_seconds=[0, 0, 0.3, 0], forward_seconds=[0.1] * 4)
        follower.until(lambda view: True)
    told = [line for line in capsys.readouterr().err.splitlines() if "rank" in line]
    assert told == ["! rank 2 takes 200 ms a step longer for its data than others"]


def test_who_resumes_is_told_of_the_new_start_alone(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(launch, "unattended", lambda run: False)
    run = create(tmp_path, "version: 1\n", {"name": "again", "method": "sft", "model": "builtin/tiny"})
    run.update_json(state="starting", segment=1)
    before = EventWriter(run, segment=0)
    before.write("metrics", step=8, loss=1.0)
    before.write("stopped", step=8)
    with open_view(run) as watch:
        follower = Follower(watch, after=0)
        before.write("phase", name="Training")
        follower.until(lambda view: True)
        EventWriter(run, segment=1).write("phase", name="Reading the config")
        follower.until(lambda view: True)
    assert [line for line in capsys.readouterr().err.splitlines() if line] == ["Reading the config"]


def test_a_stop_with_a_save_waits_as_long_as_the_supervisor_does(tmp_path, monkeypatch):
    run = create(tmp_path, "version: 1\n", {"name": "long", "method": "sft", "model": "builtin/tiny"})
    run.update_json(state="running", grace_seconds=5)
    asked = {}
    monkeypatch.setattr(stop, "ask", lambda folder, do, **more: asked.update({do: more["patience"]}) or RunView())
    for words in (["--save"], []):
        assert stop.command.main([str(run.path), *words], standalone_mode=False) == 0
    assert asked == {"save_stop": LONG_STEP_SECONDS + 10, "stop": 40}


def test_who_follows_a_run_as_a_containers_first_process_leaves_no_zombie(tmp_path, monkeypatch):
    run = create(tmp_path, "version: 1\n", {"name": "first", "method": "sft", "model": "builtin/tiny"})
    run.update_json(state="stopped")
    with subprocess.Popen(["true"]) as child, open_view(run) as watch:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        of_it = {"getpid": lambda: 1, "waitpid": lambda _, how: os.waitpid(child.pid, how), "WNOHANG": os.WNOHANG}
        monkeypatch.setattr(following, "os", SimpleNamespace(**of_it))
        Follower(watch).until(lambda view: True)
        assert not os.path.exists(f"/proc/{child.pid}")


def test_a_containers_first_process_is_ended_by_sigterm_from_the_start_and_refuses_to_leave(monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    try:
        with pytest.raises(
            UsageError, match="--detach: must be left out in a command that is a container's first process"
        ):
            train.hold_container(detach=True)
        train.hold_container(detach=False)
        with pytest.raises(Cancelled, match="Ended by SIGTERM") as told:
            signal.raise_signal(signal.SIGTERM)
        assert told.value.exit_code == 143
    finally:
        signal.signal(signal.SIGTERM, before)
