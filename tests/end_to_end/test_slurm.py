"""A real SLURM of one node: a run waits, works, is signalled, requeued and resumed to its end; another is cancelled outside.
So are the runs of an array."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.run import launch, slurm
from engine.run.index import peek
from engine.run.store import RunFolder, runs_in
from engine.run.view import RunView
from tests import warm
from tests.end_to_end.cluster import cluster, lacks

CONFIG = """
model: {name: builtin/tiny, dtype: float32}
data: {train: [{path: builtin/dates}], max_length: 128}
optim: {per_device_train_batch_size: 4, gradient_accumulation_steps: 1}
"""


@pytest.fixture
def desk(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory whose commands reach the cluster; its parameter is how many nodes that has, one by default."""
    if why := lacks():
        pytest.skip(why)
    (tmp_path / "my.yaml").write_text(CONFIG)
    monkeypatch.delenv("WORKBENCH_RUNS", raising=False)
    with cluster(tmp_path / "cluster", getattr(request, "param", 1)) as environ:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        yield tmp_path


def submit(desk: Path, *words: str) -> RunFolder:
    known = {run.id for run in runs_in(desk / "runs")}
    done = warm.command("submit", "my.yaml", "--to", "slurm", "--time", "30", *words, cwd=desk)
    assert done.returncode == 0, done.stderr
    (run,) = [run for run in runs_in(desk / "runs") if run.id not in known]
    return run


def reaches(run: RunFolder, state: str, step: int = 0, seconds: float = 240) -> RunView:
    end = time.monotonic() + seconds
    while True:
        launch.attend_or_report(run)
        view = peek(run).view
        if view.state == state and view.step >= step:
            return view
        log = (run.path / "slurm.log").read_text() if (run.path / "slurm.log").exists() else ""
        assert not view.over or view.state == state, (view.state, view.cause, log)
        assert time.monotonic() < end, (view.state, view.cause, log)
        time.sleep(0.3)


def ask(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True, timeout=60, env=os.environ)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_of_two_processes_is_signalled_requeued_and_resumed_while_others_wait(desk: Path) -> None:
    run = submit(desk, "optim.max_steps=150", "run.devices=2", "run.save_steps=1000")
    other = submit(desk, "optim.max_steps=5")
    third = submit(desk, "optim.max_steps=5000")
    assert "Resources" in reaches(other, "queued").cause or "Priority" in peek(other).view.cause
    ask("scancel", slurm.number(third))
    assert reaches(third, "stopped").cause == f"Job {slurm.number(third)} was cancelled in the cluster"

    reaches(run, "running", step=10)
    ask("scancel", "--signal=USR1", "--batch", slurm.number(run))  # as SLURM does before the time limit
    requeued = reaches(run, "queued", step=10)
    assert "requeued" in requeued.cause
    assert requeued.committed == [requeued.step]
    assert reaches(other, "finished").step == 5, "it has the node meanwhile"

    ask("scontrol", "update", f"JobId={slurm.number(run)}", "StartTime=now")  # SLURM would wait two minutes
    assert reaches(run, "finished").step == 150
    events = [json.loads(line) for line in run.events.read_text().splitlines()]
    starts = [event for event in events if event["kind"] == "started"]
    assert [start["segment"] for start in starts] == [0, 1]
    assert starts[0]["world_size"] == 2
    assert starts[1]["resumed_from_step"] == requeued.step

    preempted = submit(desk, "optim.max_steps=4000")
    reaches(preempted, "running", step=3)
    ask("scontrol", "requeue", slurm.number(preempted))  # ends it with SIGTERM, as a preemption does
    left = reaches(preempted, "queued", step=3)
    assert left.committed == [left.step]
    done = warm.command("stop", preempted.id, cwd=desk)
    assert done.returncode == 0, done.stderr
    assert reaches(preempted, "stopped").committed == [left.step]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_runs_of_an_array_wait_work_are_requeued_and_stopped_each_by_itself(desk: Path) -> None:
    words = ("optim.max_steps=5000,20,21,22", "run.save_steps=1000", "--to", "slurm", "--time", "30")
    done = warm.command("sweep", "my.yaml", *words, "--array-limit", "1", "--detach", cwd=desk)
    assert done.returncode == 0, done.stderr
    one, two, three, four = sorted(runs_in(desk / "runs"), key=lambda run: run.id)
    array = slurm.number(one).partition("_")[0]
    assert [slurm.number(run) for run in (one, two, three, four)] == [f"{array}_{place}" for place in range(4)]
    reaches(one, "running", step=10)
    assert reaches(two, "queued").cause == f"job {array}_1 waits in the cluster (JobArrayTaskLimit)"
    ask("scancel", slurm.number(three))
    # squeue says it, or has forgotten it by then, as it may a task of an array that waited.
    cause = reaches(three, "stopped").cause
    assert cause.startswith(f"Job {array}_2 ")
    assert "was cancelled" in cause
    done = warm.command("stop", four.id, cwd=desk)
    assert done.returncode == 0, done.stderr
    assert reaches(four, "stopped").step == 0
    assert reaches(two, "queued").step == 0, "the others wait on"

    # Two minutes before its end SLURM signals it: at once, that is at its next look, each half a minute.
    ask("scontrol", "update", f"JobId={slurm.number(one)}", "TimeLimit=2")
    requeued = reaches(one, "queued", step=10)
    assert requeued.cause.startswith("requeued: ")
    assert requeued.committed[-1] == requeued.step
    assert reaches(two, "finished").step == 20, "it has the node meanwhile"
    # SLURM would wait two minutes.
    ask("scontrol", "update", f"JobId={slurm.number(one)}", "TimeLimit=30", "StartTime=now")
    reaches(one, "running", step=requeued.step + 5)
    starts = [json.loads(line) for line in one.events.read_text().splitlines() if '"kind":"started"' in line]
    assert [start["segment"] for start in starts] == [0, 1]
    assert starts[1]["resumed_from_step"] == requeued.step
    done = warm.command("stop", one.id, cwd=desk)
    assert done.returncode == 0, done.stderr
    assert reaches(one, "stopped").step > requeued.step


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("desk", [2], indirect=True)
def test_a_sweep_whose_runs_take_both_nodes_each_is_followed_to_its_table(desk: Path) -> None:
    words = ("optim.max_steps=4,6", "--to", "slurm", "--nodes", "2", "--time", "30", "--json")
    done = warm.command("sweep", "my.yaml", *words, cwd=desk, timeout=800)
    assert done.returncode == 0, done.stderr + "".join(path.read_text() for path in desk.glob("runs/*/*.log"))
    told = json.loads(done.stdout)
    assert sorted(row["step"] for row in told["runs"]) == [4, 6]
    runs = sorted(runs_in(desk / "runs"), key=lambda run: run.id)
    assert [slurm.number(run).partition("_")[2] for run in runs] == ["0", "1"]
    for run in runs:
        assert run.state == "finished"
        (start,) = [json.loads(line) for line in run.events.read_text().splitlines() if '"kind":"started"' in line]
        assert start["world_size"] == 2
        assert (run.path / "worker-1.log").exists(), "the second node had its part"
