"""`workbench submit` against programs that play SLURM: its script, its refusals, and what becomes of the run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import RunBusy, WorkbenchError
from engine.job import main
from engine.run import control, launch, lock, slurm
from engine.run.delete import delete
from engine.run.index import peek
from engine.run.process import identity
from engine.run.queue import move, queue_of
from engine.run.store import RunFolder, runs_in
from tests import warm

CONFIG = "model: {name: builtin/tiny}\ndata: {train: [{path: builtin/dates}]}\noptim: {max_steps: 60}\n"
STEP_SECONDS = 0.01
PLAYED = """#!/bin/sh
echo "${0##*/} $*" >> "$PLAY/calls"
cat "$PLAY/${0##*/}.says" 2>/dev/null
cat "$PLAY/${0##*/}.refuses" >&2 2>/dev/null && exit 1
exit 0
"""


class Scheduler:
    """What the played programs say, and what was asked of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("sbatch", "squeue", "scancel", "scontrol"):
            (folder / name).write_text(PLAYED)
            (folder / name).chmod(0o755)
        self.says("sbatch", "42;test\n")
        self.says("squeue", "42|PENDING|Resources\n")

    def says(self, program: str, text: str) -> None:
        (self.folder / f"{program}.says").write_text(text)
        slurm._said = (-1e9, None)

    def refuses(self, program: str, text: str) -> None:
        (self.folder / f"{program}.refuses").write_text(text)

    def calls(self, program: str) -> list[str]:
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.partition(" ")[2] for line in lines if line.startswith(f"{program} ")]


@pytest.fixture
def played(place: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    folder = tmp_path_factory.mktemp("programs")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("PLAY", str(folder))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return Scheduler(folder)


def submit(place: Path, *words: str) -> Any:
    return warm.command("submit", "my.yaml", "--to", "slurm", *words, cwd=place)


def submitted(place: Path, *words: str) -> RunFolder:
    done = submit(place, *words)
    assert done.returncode == 0, done.stderr
    return list(runs_in(place / "runs"))[-1]


def until(hold: Callable[[], object], what: str) -> None:
    end = time.monotonic() + 60
    while not hold():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def test_the_script_says_all_and_a_dry_run_makes_nothing(place: Path, played: Scheduler) -> None:
    words = ("--time", "4:00:00", "--gres=gpu:2", "--sbatch=--constraint=a100", "run.grace_seconds=90")
    done = submit(place, *words, "--dry-run", "--json")
    said = json.loads(done.stdout)["script"]
    asked = [line.removeprefix("#SBATCH ") for line in said.splitlines() if line.startswith("#SBATCH")]
    assert {"--nodes=1", "--requeue", "--open-mode=append", "--signal=B:USR1@180"} < set(asked)
    assert asked[-3:] == ["--time=4:00:00", "--gres=gpu:2", "--constraint=a100"]
    assert said.splitlines()[-1].endswith(f"-m engine.job -- {place}/runs/my-NNNN")
    several = json.loads(submit(place, "--nodes", "3", "--dry-run", "--json").stdout)["script"].splitlines()
    assert {"#SBATCH --nodes=3", "#SBATCH --ntasks=3", "#SBATCH --ntasks-per-node=1"} < set(several)
    assert several[-1].startswith("exec srun ")
    assert not (place / "runs").exists()
    assert played.calls("sbatch") == []
    run = submitted(place, *words)
    assert (run.path / "job.sbatch").read_text() == said.replace("my-NNNN", "my-0001")
    assert played.calls("sbatch") == [f"--parsable {run.path}/job.sbatch"]


def test_what_cannot_be_is_refused_and_leaves_no_run(place: Path, played: Scheduler) -> None:
    for words, place_of_it in (
        (("--nodes", "0"), "'--nodes': 0 is not in the range"),
        (("--sbatch=--array=1-3",), "--array is set by the script itself"),
        (("--sbatch=-N2",), "--nodes is set by the script itself"),
        (("--sbatch=exclusive",), "must be one option of sbatch; got 'exclusive'"),
        (("--time", "1:00\n#SBATCH --uid=0"), "--time: must be one word"),
        (("optim.learning_rate=-1",), "the config has 1 error; no run was submitted"),
    ):
        done = submit(place, *words, "--json")
        assert done.returncode > 0, words
        assert place_of_it in json.loads(done.stdout)["error"]["message"]
    played.refuses("sbatch", "sbatch: error: Batch job submission failed: Invalid partition name specified\n")
    done = submit(place, "--partition", "gone", "--json")
    said = json.loads(done.stdout)["error"]
    assert done.returncode == 1
    assert "Invalid partition name specified" in said["message"]
    assert said["hint"]
    assert list(runs_in(place / "runs")) == []


def test_without_a_scheduler_nothing_is_made(place: Path, played: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    (played.folder / "sbatch").unlink()
    monkeypatch.setenv("PATH", str(played.folder))
    done = submit(place)
    assert done.returncode == 1
    assert "Error: sbatch was not found." in done.stderr.splitlines()
    assert not (place / "runs").exists()
    assert submit(place, "--dry-run").returncode == 0


def test_a_job_that_waits_is_queued_here_and_taken_out_there(place: Path, played: Scheduler) -> None:
    run = submitted(place)
    assert launch.look_after(run) == ""
    view = peek(run).view
    assert (view.state, view.cause) == ("queued", "job 42 waits in the cluster (Resources)")
    assert run.supervisor() is None, "nothing is started for it here"
    assert queue_of(run.path.parent) == []
    with pytest.raises(WorkbenchError, match="whose queue is the cluster's"):
        move(run, 0)
    with pytest.raises(RunBusy, match="queued as job 42"):
        delete(run)
    with pytest.raises(RunBusy):
        launch.resume(run)

    played.refuses("scancel", "scancel: error: Kill job error on job id 42: Access denied\n")
    with pytest.raises(WorkbenchError, match="Access denied"):
        control.request(run, "stop")
    (played.folder / "scancel.refuses").unlink()
    played.says("squeue", "42|CANCELLED|None\n")
    done = warm.command("stop", run.id, cwd=place)
    assert done.returncode == 0, done.stderr
    assert "stopped at step 0" in done.stdout
    assert played.calls("scancel")[-1] == "--state=PENDING 42"
    assert run.read_json()["message"] == "Job 42 was cancelled by workbench while it waited"

    played.says("sbatch", "43\n")
    played.says("squeue", "43|PENDING|Priority\n42|CANCELLED|None\n")
    done = warm.command("resume", run.id, "--detach", "--json", cwd=place)
    assert json.loads(done.stdout)["state"] == "queued", done.stderr
    assert slurm.number(run) == "43"
    assert list(run.control.iterdir()) == []
    assert played.calls("sbatch")[-1] == f"--parsable {run.path}/job.sbatch"


def test_the_end_of_a_job_that_could_not_say_so_is_written_down(place: Path, played: Scheduler) -> None:
    run = submitted(place)
    for said, before, state, words in (
        ("42|RUNNING|None", "queued", "queued", ""),
        ("42|COMPLETING|None", "running", "running", ""),
        ("42|PENDING|BeginTime", "running", "queued", "requeued: job 42 waits in the cluster (BeginTime)"),
        ("42|CANCELLED|None", "queued", "stopped", "Job 42 was cancelled in the cluster"),
        ("42|CANCELLED|None", "running", "stopped", "Job 42 was cancelled in the cluster"),
        ("42|TIMEOUT|TimeLimit", "running", "stopped", "Job 42 reached its time limit"),
        ("42|OUT_OF_MEMORY|None", "running", "failed", "more memory"),
        ("42|NODE_FAIL|None", "running", "lost", "lost its node"),
        ("41|RUNNING|None", "running", "lost", "without a final word"),
        ("41|RUNNING|None", "queued", "stopped", "is not queued again"),
        ("42|FAILED|NonZeroExitCode", "first", "failed", "ended before the run began"),
    ):
        played.says("squeue", f"{said}\n")
        begun = {"segment": None, "state": "queued"} if before == "first" else {"segment": 0, "state": before}
        values = {**run.read_json(), **begun, "message": ""}
        if before == "first":
            del values["segment"]
        run.json.write_text(json.dumps(values))
        assert slurm.refresh(run) == state, said
        assert words in run.read_json()["message"], said
        assert peek(run).view.state == state, said
    (run.path / "slurm.log").write_text("job.sbatch: line 15: python: No such file\n")
    run.json.write_text(json.dumps(values))
    slurm._said = (-1e9, None)
    slurm.refresh(run)
    assert "No such file" in run.read_json()["message"]

    played.refuses("squeue", "slurm_load_jobs error: Unable to contact slurm controller\n")
    played.says("squeue", "")
    run.update_json(state="running", segment=0)
    assert slurm.refresh(run) == "running", "a scheduler that is away says nothing of the run"


def test_a_copy_of_the_folder_is_not_the_clusters(place: Path, played: Scheduler) -> None:
    run = submitted(place)
    subprocess.run(["cp", "-r", run.path, place / "runs" / "my-0002"], check=True)
    copy = RunFolder(place / "runs" / "my-0002")
    copy.update_json(submitted=0)
    control.request(copy, "stop")
    assert played.calls("scancel") == [], "the job of the other run goes on"
    assert launch.attend(copy) == "lost"
    assert run.state == "queued"


def test_a_heartbeat_of_another_host_holds_the_run(place: Path, played: Scheduler) -> None:
    run = submitted(place)
    run.lock.touch(0o600)
    there = os.stat(run.lock)
    me = identity()
    assert me is not None
    record = {**me.as_json(), "host": "node7", "how": "heartbeat", "file": [there.st_dev + 1, there.st_ino]}
    run.lock.write_text(json.dumps(record))
    assert lock.is_held(run), "a network file system has another device number on each host"
    os.utime(run.lock, (0, 0))
    assert not lock.is_held(run)
    run.lock.write_text(json.dumps({**record, "file": [there.st_dev, there.st_ino + 1]}))
    assert not lock.is_held(run), "that is the record of another file"


# -- the job itself ----------------------------------------------------------------------------------------------------


def job(run: RunFolder) -> subprocess.Popen[bytes]:
    """The script as SLURM runs it."""
    with open(run.path / "slurm.log", "ab") as log:
        return subprocess.Popen(
            ["bash", str(run.path / "job.sbatch")], stdout=log, stderr=log, env={**os.environ, "SLURM_JOB_ID": "42"}
        )


def kinds(run: RunFolder) -> list[str]:
    events = [json.loads(line) for line in run.events.read_text().splitlines()]
    return [event["kind"] for event in events if event["kind"] in ("started", "finished", "stopped", "failed")]


def test_a_signal_saves_and_requeues_and_the_run_goes_on(place: Path, played: Scheduler) -> None:
    run = submitted(place, "optim.max_steps=200")
    assert "learning_rate: auto" in run.read_config()
    played.says("squeue", "42|RUNNING|None\n")
    for number in (signal.SIGUSR1, signal.SIGTERM):
        process = job(run)
        before = len(kinds(run)) if run.events.exists() else 0
        until(lambda: run.events.exists() and len(kinds(run)) > before, "it started")
        process.send_signal(number)
        assert process.wait(60) == 0, (run.path / "slurm.log").read_text()
        assert kinds(run)[before:] == ["started", "stopped"]
        assert played.calls("scontrol")[-1] == "requeue 42"
        view = peek(run).view
        assert view.state == "queued"
        assert view.cause.startswith("requeued: job 42")
        assert view.committed[-1] == view.step, "nothing was lost"
    assert len(played.calls("scontrol")) == 2
    assert "learning_rate: auto" not in run.read_config(), "chosen on the node"
    assert run.read_json()["auto"]["optim.learning_rate"]["reason"]
    assert lock.is_held(run) is False
    assert "heartbeat" not in run.lock.read_text()
    process = job(run)
    assert process.wait(60) == 0
    assert kinds(run)[-1] == "finished"
    assert run.state == "finished"
    starts = [json.loads(line) for line in run.events.read_text().splitlines() if '"kind":"started"' in line]
    assert [each["segment"] for each in starts] == [0, 1, 2]
    assert starts[2]["resumed_from_step"]
    assert len(played.calls("scontrol")) == 2, "a finished run is not queued again"
    assert main(str(run.path), "42") == 0
    assert len(kinds(run)) == 6, "nor is it begun anew"


def test_what_a_person_stops_and_what_slurm_ends_or_refuses_is_not_queued_again(place: Path, played: Scheduler) -> None:
    played.says("squeue", "42|RUNNING|None\n")
    run = submitted(place, "optim.max_steps=5000")

    def signalled(number: signal.Signals) -> None:
        before = len(kinds(run)) if run.events.exists() else 0
        process = job(run)
        until(lambda: run.events.exists() and len(kinds(run)) > before, "it started")
        process.send_signal(number)
        assert process.wait(60) == 0

    process = job(run)
    until(lambda: run.events.exists() and "started" in kinds(run), "it started")
    control.request(run, "stop", by="a person")
    assert process.wait(60) == 0
    assert run.state == "stopped"
    assert played.calls("scontrol") == []

    run.update_json(state="queued", ended=None)
    played.says("squeue", "42|COMPLETING|None\n")
    signalled(signal.SIGTERM)
    assert run.state == "queued"
    assert played.calls("scontrol") == [], "SLURM ends it, and decides"
    played.says("squeue", "42|CANCELLED|None\n")
    assert launch.attend(run) == "stopped"
    assert peek(run).view.cause == "Job 42 was cancelled in the cluster"

    run.update_json(state="queued", ended=None)
    played.says("squeue", "42|RUNNING|None\n")
    played.refuses("scontrol", "slurm_requeue error: Requested operation is presently disabled\n")
    signalled(signal.SIGUSR1)
    assert run.state == "stopped"
    assert "presently disabled" in run.read_json()["message"]


def test_a_time_limit_that_is_too_short_ends_the_run(
    place: Path, played: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMALL_WORKER", json.dumps({"step_seconds": 0.01, "deaf": True, "save_steps": 10_000}))
    run = submitted(place, "optim.max_steps=9000", "run.grace_seconds=1")
    played.says("squeue", "42|RUNNING|None\n")
    for vain, state in ((0, "queued"), (2, "stopped")):
        run.update_json(requeued_in_vain=vain)
        before = len(kinds(run)) if run.events.exists() else 0
        process = job(run)
        until(lambda: run.events.exists() and len(kinds(run)) > before, "it started")
        process.send_signal(signal.SIGUSR1)
        assert process.wait(60) == 0
        assert run.state == state
    assert "3 times in a row" in run.read_json()["message"]
    assert played.calls("scontrol") == ["requeue 42"]


def test_a_node_that_cannot_run_it_says_why(place: Path, played: Scheduler) -> None:
    run = submitted(place, "run.devices=[3]")
    assert job(run).wait(60) == 1
    assert run.state == "failed"
    assert "run.devices" in run.read_json()["message"]
    assert not run.events.exists(), "no worker was started"
