"""`workbench submit` against programs that play SLURM: its script, its refusals, and what becomes of the run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
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
from engine.run.spawn import safe_python
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
    for theirs, ours in (
        ("fatal: Could not establish a configuration source", "this machine belongs to no SLURM cluster"),
        ("error: Unable to contact slurm controller (connect failure)", "controller of this SLURM cluster does not"),
    ):
        played.refuses("sbatch", f"sbatch: {theirs}\n")
        done = submit(place, "--json")
        assert done.returncode == 1
        assert ours in json.loads(done.stdout)["error"]["message"]
    played.refuses("sbatch", "sbatch: error: Batch job submission failed: Invalid partition name specified\n")
    done = submit(place, "--partition", "gone", "--json")
    said = json.loads(done.stdout)["error"]
    assert done.returncode == 1
    assert "Invalid partition name specified" in said["message"]
    assert said["hint"]
    assert list(runs_in(place / "runs")) == []


def array(place: Path, played: Scheduler, *words: str, folder: str = "runs") -> list[RunFolder]:
    """Two configs as one array."""
    (place / "two.yaml").write_text(CONFIG + "run: {seed: 7}\n")
    played.says("squeue", "42_0|RUNNING|None\n42_1|PENDING|JobArrayTaskLimit\n")
    done = submit(place, "two.yaml", *words, "--runs", folder)
    assert done.returncode == 0, done.stderr
    return sorted(runs_in(place / folder), key=lambda run: run.id)


def test_several_configs_are_one_array_whose_script_names_each_folder(place: Path, played: Scheduler) -> None:
    words = ("--array-limit", "1", "--time", "4:00:00", "run.grace_seconds=90")
    (place / "two.yaml").write_text(CONFIG + "run: {seed: 7}\n")
    dry = json.loads(submit(place, "two.yaml", *words, "--dry-run", "--json").stdout)["script"]
    assert not (place / "runs").exists()
    one, two = array(place, played, *words, "--json")
    said = (one.path / "array.sbatch").read_text()
    assert {"#SBATCH --array=0-1%1", "#SBATCH --requeue", "#SBATCH --signal=B:USR1@180"} < set(said.splitlines())
    assert f"  {one.path}  # 0: my.yaml\n  {two.path}  # 1: two.yaml\n" in said
    assert dry.splitlines()[2:] == said.replace("my-0001", "my-NNNN").replace("two-0001", "two-NNNN").splitlines()[2:]
    assert played.calls("sbatch") == [f"--parsable {one.path}/array.sbatch"]
    assert [slurm.number(run) for run in (one, two)] == ["42_0", "42_1"]
    assert (two.path / "job.sbatch").read_text().splitlines()[-1].endswith(f"engine.job -- {two.path}")
    assert peek(two).view.cause == "job 42_1 waits in the cluster (JobArrayTaskLimit)"


def test_an_array_is_submitted_whole_or_not_at_all(
    place: Path, played: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "two.yaml").write_text(CONFIG)
    (place / "bad.yaml").write_text(CONFIG + "adapter: {r: -1}\n")
    (place / "wide.yaml").write_text(CONFIG + "distributed: {nodes: 2}\n")
    for words, place_of_it in (
        (("bad.yaml",), "bad.yaml: the config has 1 error; no run was submitted"),
        (("gone.yaml",), "gone.yaml: must be a config file, or KEY=VALUE"),
        (("two.yaml",), "two.yaml and my.yaml are one and the same config"),
        (
            ("wide.yaml",),
            "distributed.nodes: must be the same for all runs of an array; my.yaml has 1, wide.yaml has 2",
        ),
        (("two.yaml", "--sbatch=--array=1-3"), "--array is set by the script itself, for several configs or a sweep"),
        (("--array-limit", "2"), "--array-limit: needs several configs; got one"),
    ):
        done = submit(place, *words, "--json")
        assert done.returncode > 0, words
        assert place_of_it in json.loads(done.stdout)["error"]["message"]
    done = warm.command("sweep", "my.yaml", "optim.max_steps=4,-6", "--to", "slurm", cwd=place)
    assert "with optim.max_steps=-6: the config has 1 error; no run was submitted" in done.stderr
    assert played.calls("sbatch") == []
    played.refuses("sbatch", "sbatch: error: Batch job submission failed: Invalid job array specification\n")
    (place / "two.yaml").write_text(CONFIG.replace("60", "90"))
    done = submit(place, "two.yaml", "--json")
    assert "Invalid job array specification" in json.loads(done.stdout)["error"]["message"]
    assert list(runs_in(place / "runs")) == []
    (played.folder / "sbatch.refuses").unlink()
    runs = array(place, played)
    real = slurm.note

    def full(run: RunFolder, number: str) -> None:
        if number == "42_1":
            raise OSError(28, "No space left on device")
        real(run, number)

    monkeypatch.setattr(slurm, "note", full)
    with pytest.raises(OSError, match="No space"):
        slurm.submit_array(runs, "#!/bin/bash\n")
    assert played.calls("scancel") == ["42"], "what was handed over is taken back"


def test_a_task_that_waits_is_taken_out_alone(place: Path, played: Scheduler) -> None:
    one, two = array(place, played)
    one.update_json(state="running", segment=0)
    played.says("squeue", "42_0|RUNNING|None\n42_1|RUNNING|None\n")
    control.request(two, "stop")
    assert played.calls("scancel") == [], "it has begun meanwhile, and gets the request itself"
    played.says("squeue", "42_0|RUNNING|None\n42_1|PENDING|JobArrayTaskLimit\n")
    scancel = played.folder / "scancel"
    # As SLURM does: a cancelled task is not told of any more.
    scancel.write_text(PLAYED.replace("exit 0", 'echo "42_0|RUNNING|None" > "$PLAY/squeue.says"'))
    done = warm.command("stop", two.id, cwd=place)
    assert done.returncode == 0, done.stderr
    assert played.calls("scancel") == ["42_1"], "with --state=PENDING SLURM would end every waiting task"
    assert two.read_json()["message"] == "Job 42_1 was cancelled by the command line while it waited"
    assert slurm.refresh(one) == "running"
    two.update_json(state="queued", message="", ended=None)
    assert slurm.refresh(two) == "stopped"
    assert "left the cluster's queue before the run began: it was cancelled, or" in two.read_json()["message"]
    two.update_json(state="queued", message="", ended=None)
    (two.path / "slurm.log").write_text("array.sbatch: line 15: python: No such file\n")
    assert slurm.refresh(two) == "failed", "it had a node"
    assert "No such file" in two.read_json()["message"]
    played.says("sbatch", "43\n")
    played.says("squeue", "43|PENDING|Priority\n42_0|RUNNING|None\n")
    done = warm.command("resume", two.id, "--detach", "--json", cwd=place)
    assert json.loads(done.stdout)["state"] == "queued", done.stderr
    assert slurm.number(two) == "43", "it goes on as a job of its own"
    assert slurm.number(one) == "42_0"


def test_a_sweep_is_one_array(place: Path, played: Scheduler) -> None:
    words = ("my.yaml", "run.seed=1,2", "optim.max_steps=5", "--to", "slurm", "--detach")
    dry = warm.command("sweep", *words, "--dry-run", "--array-limit", "1", cwd=place)
    assert "# 1: run.seed=2" in dry.stdout
    assert not (place / "runs").exists()
    played.says("squeue", "42_0|PENDING|None\n42_1|PENDING|None\n")
    done = warm.command("sweep", *words, "--json", cwd=place)
    found = json.loads(done.stdout)
    assert [(row["values"], row["state"]) for row in found["runs"]] == [
        ({"run.seed": seed}, "queued") for seed in ("1", "2")
    ]
    runs = sorted(runs_in(place / "runs"), key=lambda run: run.id)
    assert [slurm.number(run) for run in runs] == ["42_0", "42_1"]
    assert all(f"seed: {seed}" in run.read_config() for seed, run in enumerate(runs, 1))
    assert len(played.calls("sbatch")) == 1
    again = json.loads(warm.command("sweep", found["sweep"], "--json", cwd=place).stdout)
    assert [row["id"] for row in again["runs"]] == [run.id for run in runs]
    for wrong, sentence in (
        (("my.yaml", "run.seed=1,2", "--time", "5"), "--time: needs --to slurm"),
        ((found["sweep"], "--array-limit", "2"), "--array-limit: needs a config FILE and settings with several values"),
    ):
        done = warm.command("sweep", *wrong, "--json", cwd=place)
        assert done.returncode == 2
        assert sentence in json.loads(done.stdout)["error"]["message"]


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
    assert launch.attend_or_report(run) == ""
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
    assert run.read_json()["message"] == "Job 42 was cancelled by the command line while it waited"

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


def job(run: RunFolder, script: str = "job.sbatch", **more: str) -> subprocess.Popen[bytes]:
    """The script as SLURM runs it."""
    with open(run.path / "slurm.log", "ab") as log:
        return subprocess.Popen(
            ["bash", str(run.path / script)], stdout=log, stderr=log, env={**os.environ, "SLURM_JOB_ID": "42", **more}
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


def test_a_job_that_must_go_while_its_nodes_gather_is_queued_again(place: Path, played: Scheduler) -> None:
    run = submitted(place, "--nodes", "2")
    played.says("squeue", "42|RUNNING|None\n")
    several = {"SLURM_JOB_ID": "42", "SLURM_NODEID": "0", "SLURM_NNODES": "2", "SLURM_STEP_NUM_NODES": "2"}
    with open(run.path / "slurm.log", "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "engine.job", "--", str(run.path)], stdout=log, stderr=log,
            env={**os.environ, **safe_python(os.environ), **several},
        )  # fmt: skip
    until(lambda: "1 of 2 nodes came" in str(run.read_json().get("message")), "it waits for the other node")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0, (run.path / "slurm.log").read_text()
    assert run.state == "queued"
    assert run.read_json()["message"] == "requeued: job 42 was told to end; the run goes on when the job begins again"
    assert played.calls("scontrol") == ["requeue 42"]


def test_a_task_of_an_array_works_in_its_own_folder_and_is_queued_again_alone(place: Path, played: Scheduler) -> None:
    one, two = array(place, played, "optim.max_steps=200", folder="a b'$(touch gone)#")
    played.says("squeue", "42_0|PENDING|JobArrayTaskLimit\n42_1|RUNNING|None\n")
    task = {"SLURM_JOB_ID": "57", "SLURM_ARRAY_JOB_ID": "42", "SLURM_ARRAY_TASK_ID": "1"}
    process = job(one, "array.sbatch", **task)
    until(lambda: two.events.exists() and "started" in kinds(two), "it started")
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 0, (two.path / "slurm.log").read_text()
    assert played.calls("scontrol") == ["requeue 42_1"]
    assert slurm.number(two) == "42_1"
    assert peek(two).view.cause.startswith("requeued: job 42_1")
    assert job(one, "array.sbatch", **task).wait(60) == 0
    assert kinds(two) == ["started", "stopped", "started", "finished"]
    assert two.state == "finished"
    assert not one.events.exists(), "that is another task's"
    assert not (place / "gone").exists()
    assert one.state == "queued"


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
