"""The real worker, cold: killed and resumed to the bit, and two ranks through torchrun of which one is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from engine.config.facts import Facts
from engine.config.files import absolute, overrides
from engine.config.recipes import recipe_mapping
from engine.rules import read
from engine.run import checkpoint, control, launch, store
from engine.run.batches import rows_of
from engine.run.events import FINAL
from engine.run.from_config import launch_config
from engine.run.in_flight import in_flight
from engine.run.lock import is_held
from engine.run.process import send
from engine.run.process_group import ProcessTree
from engine.run.store import ENDED, RunFolder
from engine.run.tail import Tail
from engine.run.view import RunView, fold

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield tmp_path / "runs"
    for run in store.runs_in(tmp_path / "runs"):
        for who in (run.supervisor(), run.worker()):
            if who is not None:
                send(who, signal.SIGKILL)


def demo(runs: Path, name: str, *pairs: str) -> RunFolder:
    settings = [
        "optim.max_steps=30",
        "run.save_steps=10",
        "run.eval_steps=20",
        "run.prompts_steps=20",
        "optim.per_device_train_batch_size=8",
    ]
    mapping = overrides(absolute(recipe_mapping("demo"), runs.parent), [*settings, f"run.name={name}", *pairs])
    reading = read(mapping, Facts())
    assert reading.ok, reading.findings
    return launch_config(reading.config, Facts(), runs_dir=runs)


def view_of(run) -> RunView:
    view, tail = RunView(), Tail(run.events)
    while events := tail.read():
        fold(view, events)
    return view


def until(condition, seconds=240.0):
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < seconds, "it did not happen in time"
        time.sleep(0.02)
    return time.monotonic() - begun


def over(run):
    return run.state in ENDED


def test_a_killed_run_resumes_to_the_same_losses_and_weights(runs, promptly):
    whole = demo(runs, "whole")
    until(lambda: over(whole))
    assert whole.state == "finished", view_of(whole).cause
    broken = demo(runs, "broken")
    until(lambda: view_of(broken).step >= 13)
    os.kill(broken.worker().pid, signal.SIGKILL)
    assert until(lambda: over(broken)) < promptly(2)
    assert "was ended by SIGKILL" in view_of(broken).cause
    step, rows = in_flight(broken)
    # Numbers are written a tenth of a second late, in which a small model makes several steps; rows are noted at once.
    assert view_of(broken).step <= step <= 30
    assert rows == rows_of(whole, step)[: len(rows)]
    newest, _ = launch.resume(broken)
    until(lambda: over(broken))
    assert broken.state == "finished", view_of(broken).cause
    one, other = view_of(whole), view_of(broken)
    assert other.resumed_from == checkpoint.step_of(newest) >= 10
    assert list(one.series["loss"].points()[0]) == list(range(1, 31))
    for name in ("loss", "grad_norm", "learning_rate", "eval_loss"):
        assert one.series[name] == other.series[name], name
    files = [
        json.loads((run.checkpoints / "checkpoint-30" / "COMMIT.json").read_text())["files"] for run in (whole, broken)
    ]
    weights = [entry["model.safetensors"]["sha256"] for entry in files]
    assert weights[0] == weights[1]


def test_a_run_that_may_restart_ends_with_the_weights_of_one_that_was_never_killed(runs):
    whole = demo(runs, "whole")
    until(lambda: over(whole))
    broken = demo(runs, "broken", "run.max_restarts=1")
    for step, starts in ((13, 0), (23, 1)):
        until(lambda step=step, starts=starts: view_of(broken).step >= step and len(view_of(broken).restarts) == starts)
        os.kill(broken.worker().pid, signal.SIGKILL)
    until(lambda: over(broken))
    one, other = view_of(whole), view_of(broken)
    assert (other.state, len(other.restarts), other.resumed_from) == ("finished", 2, 20)
    assert one.series["loss"] == other.series["loss"]
    files = [
        json.loads((run.checkpoints / "checkpoint-30" / "COMMIT.json").read_text())["files"] for run in (whole, broken)
    ]
    weights = [entry["model.safetensors"]["sha256"] for entry in files]
    assert weights[0] == weights[1]


def test_a_lost_rank_is_made_up_for(runs):
    run = demo(runs, "two", "run.devices=2", "optim.max_steps=24", "run.max_restarts=2")
    until(lambda: view_of(run).step >= 13)
    family = ProcessTree(run.read_json()["token"], run.worker(), 2)
    until(lambda: family.poll(lambda: False) is None and len(family.ranks) == 2, 10)
    os.kill(family.ranks[1].pid, signal.SIGKILL)
    until(lambda: over(run))
    view = view_of(run)
    assert (view.state, view.step, view.resumed_from) == ("finished", 24, 10)
    assert "Rank 1" in view.restarts[0]["message"]


def test_a_stopped_rank_is_named_and_the_run_goes_on(runs, promptly):
    settings = "run.devices=2", "optim.max_steps=24", "run.max_restarts=1", "distributed.ddp_timeout=10"
    run = demo(runs, "two", *settings)
    until(lambda: view_of(run).step >= 13)
    family = ProcessTree(run.read_json()["token"], run.worker(), 2)
    until(lambda: family.poll(lambda: False) is None and len(family.ranks) == 2, 10)
    stopped = family.ranks[1]
    os.kill(stopped.pid, signal.SIGSTOP)
    assert until(lambda: view_of(run).restarts) < 10 + promptly(10)
    assert not stopped.alive
    told = view_of(run).restarts[0]["message"]
    assert told.startswith(
        f"Rank 1 (process {stopped.pid} on {stopped.host}) hangs: it is stopped by a signal (SIGSTOP)"
    )
    assert re.search(r"rank 0 \(process \d+ on \S+\) has waited in \w+ for 1\d s", told), told
    until(lambda: over(run))
    view = view_of(run)
    assert (view.state, view.step, view.resumed_from) == ("finished", 24, 10)


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_over_nccl_a_stopped_rank_is_named_with_what_the_other_waits_in(runs, promptly, strategy):
    import torch

    if (cards := torch.cuda.device_count()) < 2:
        pytest.skip(f"needs two CUDA devices; here are {cards}")
    settings = "run.max_restarts=1", "distributed.ddp_timeout=10", f"distributed.strategy={strategy}"
    many = "optim.max_steps=20000", "run.save_steps=200", "run.eval_steps=20000", "run.prompts_steps=20000"
    run = demo(runs, "two", "run.devices=2", *many, *settings)
    until(lambda: view_of(run).step >= 201 or over(run))
    assert not over(run), view_of(run).cause
    family = ProcessTree(run.read_json()["token"], run.worker(), 2)
    until(lambda: family.poll(lambda: False) is None and len(family.ranks) == 2, 10)
    stopped = family.ranks[1]
    os.kill(stopped.pid, signal.SIGSTOP)
    took = until(lambda: view_of(run).restarts or over(run))
    events = [json.loads(line) for line in run.events.read_bytes().splitlines()]
    told, lines = next((event["message"], event["lines"]) for event in events if event["kind"] == "failed")
    print(f"NCCL, {strategy}: told {took:.1f} s after the stop: {told}", *lines, sep="\n", flush=True)
    assert took < 10 + promptly(10)
    assert told.startswith(
        f"Rank 1 (process {stopped.pid} on {stopped.host}) hangs: it is stopped by a signal (SIGSTOP)"
    )
    operation = re.search(r"rank 0 \(process \d+ on \S+\) has waited in (\w+) for 1\d s", told)
    assert operation is not None, told
    assert re.match("_?(all_?reduce|all_?gather|reduce_?scatter)", operation[1]), told
    assert any(line.startswith("rank 0,") for line in lines)
    assert any(line.startswith("rank 1,") for line in lines)
    assert any(".py:" in line for line in lines)
    until(lambda: over(run) or view_of(run).step > (view_of(run).resumed_from or 20000))
    assert not over(run), (view_of(run).cause, view_of(run).cause_lines)
    assert (view_of(run).resumed_from or 0) >= 200
    control.request(run, "stop", now=True)
    until(lambda: over(run))
    assert run.state == "stopped", view_of(run).cause


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_write_one_stream_and_a_killed_one_is_named_and_the_run_goes_on(runs, promptly, strategy):
    run = demo(runs, "two", "run.devices=2", "optim.max_steps=60", f"distributed.strategy={strategy}")
    until(lambda: view_of(run).step >= 13)
    view = view_of(run)
    assert view.world_size == 2
    events = [json.loads(line) for line in run.events.read_bytes().splitlines()]
    assert [event["seq"] for event in events] == list(range(len(events)))
    assert {event["rank"] for event in events} == {0}
    family = ProcessTree(run.read_json()["token"], run.worker(), 2)
    until(lambda: family.poll(lambda: False) is None and len(family.ranks) == 2, 10)
    os.kill(family.ranks[1].pid, signal.SIGKILL)
    assert until(lambda: over(run)) < promptly(5)
    assert view_of(run).state == "failed"
    (ending,) = [event for event in Tail(run.events).read() if event["kind"] in FINAL]
    lost = family.ranks[1]
    assert f"Rank 1 (process {lost.pid} on {lost.host}) was ended by SIGKILL" in ending["message"]
    until(lambda: not family.members() and not run.worker().alive, 5)
    assert not is_held(run)
    newest, skipped = launch.resume(run)
    assert not skipped
    until(lambda: over(run))
    view = view_of(run)
    assert (view.state, view.step) == ("finished", 60)
    assert view.resumed_from == checkpoint.step_of(newest) >= 10
    strategies = [
        e for event in Tail(run.events).read() for e in event.get("entries", ()) if e["feature"] == "strategy"
    ]
    assert [entry["effective"] for entry in strategies] == [strategy, strategy]


def test_two_ranks_that_diverge_end_with_that_as_the_cause(runs):
    hot = (
        "optim.optim=sgd",
        "optim.adam_beta2=0.999",
        "optim.learning_rate=10",
        "optim.max_grad_norm=0",
        "optim.weight_decay=1",
    )
    run = demo(runs, "hot", "run.devices=2", "optim.max_steps=200", "run.save_steps=2", *hot)
    until(lambda: over(run))
    (ending,) = [event for event in Tail(run.events).read() if event["kind"] in FINAL]
    view = view_of(run)
    assert (ending["kind"], ending["cause"], view.world_size) == ("failed", "diverged", 2)
    assert (view.cause_kind, view.diverged_at) == ("diverged", ending["step"])
    assert f"diverged at step {ending['step']}" in view.cause
    values = run.read_json()
    assert (values["state"], values["cause"], values["message"]) == ("failed", "diverged", ending["message"])
    newest, skipped = checkpoint.newest_valid(run)
    assert not skipped
    assert newest is None or checkpoint.step_of(newest) < ending["step"]
    until(lambda: not is_held(run), 5)


def test_rows_that_two_ranks_refuse_are_told_as_by_one(runs):
    run = demo(runs, "refused", "run.devices=2", "data.max_length=8")
    until(lambda: over(run))
    view = view_of(run)
    assert (view.state, view.cause_kind) == ("failed", "error")
    assert "data.max_length" in view.cause
    assert not view.cause.startswith("Rank")


@pytest.mark.parametrize("devices", [1, 2])
def test_timing_kernels_is_not_waited_for_by_who_wants_the_run_to_stop(runs, promptly, devices):
    settings = f"run.devices={devices}", "kernels.kernel_auto_compose=true"
    run = demo(runs, "timed", *settings)
    until(lambda: view_of(run).phase == "Timing kernels" or over(run))
    control.request(run, "stop")
    assert until(lambda: over(run)) < promptly(20)
    assert (run.state, run.read_json()["exit_code"]) == ("stopped", 0)
    (ending,) = [event for event in Tail(run.events).read() if event["kind"] in FINAL]
    assert (ending["kind"], ending["step"]) == ("stopped", 0)
    assert not is_held(run)


@pytest.fixture
def hooked(tmp_path, monkeypatch):
    """Has every process of a run that starts from now on run this code first; the folder that it lies in."""

    def hook(code: str) -> Path:
        folder = tmp_path / "hook"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", str(folder))
        monkeypatch.setenv("WORKBENCH_TESTS_COLD", "1")
        return folder

    return hook


BREAKS = """
import errno, os, pathlib
if os.environ.get("RANK") == "0":
    from engine.run import checkpoint
    commit = checkpoint.commit
    def breaks(tmp, info):
        if tmp.name == "checkpoint-20.tmp" and not pathlib.Path(__file__).with_name("mended").exists():
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(tmp / "COMMIT.json"))
        return commit(tmp, info)
    checkpoint.commit = breaks
"""


def test_a_commit_that_fails_on_the_first_rank_costs_no_told_step_and_is_the_cause(runs, hooked):
    """The other rank has written its part and goes on until it needs the first: what it computes there, nobody keeps or tells."""
    hook = hooked(BREAKS)
    run = demo(runs, "two", "run.devices=2", "run.max_restarts=2")
    until(lambda: over(run))
    view = view_of(run)
    assert (view.state, view.step, view.committed, view.restarts) == ("failed", 20, [10], [])
    assert "PermissionError: [Errno 13] Permission denied" in view.cause, view.cause
    assert [path.name for path in run.checkpoints.iterdir()] == ["checkpoint-10"]
    (hook / "mended").touch()
    newest, skipped = launch.resume(run)
    assert (newest.name, skipped) == ("checkpoint-10", [])
    until(lambda: over(run))
    assert run.state == "finished", view_of(run).cause
    assert list(view_of(run).series["loss"].points()[0]) == list(range(1, 31))


FALLS = """
import os
if os.environ.get("RANK") == "1":
    import torch
    from engine.trainers.ranks import Waits
    over, made = Waits.step_over, []
    def falls(self):
        made.append(1)
        if len(made) == 12:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        over(self)
    Waits.step_over = falls
"""


def test_another_rank_that_finds_no_room_on_its_card_is_named_with_that(runs, hooked):
    """The first one says last that a connection was closed, which may not come again; want of room would."""
    hooked(FALLS)
    run = demo(runs, "two", "run.devices=2", "run.max_restarts=2")
    until(lambda: over(run))
    view = view_of(run)
    assert (view.state, view.cause_kind, view.restarts) == ("failed", "GPU memory", [])
    assert re.match(r"Rank 1 \(process \d+ on \S+\) ran out of GPU memory", view.cause), view.cause
    assert view.cause_lines[-1].startswith("torch.OutOfMemoryError: CUDA out of memory")
