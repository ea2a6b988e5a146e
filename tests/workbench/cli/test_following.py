"""What is printed while a run goes: each thing once, with what matters of it, and an exit code for scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest

from engine.run import launch
from engine.run.curves import NO_REWARD_YET
from engine.run.events import EventWriter
from engine.run.index import open_view
from engine.run.store import RunFolder, create
from engine.run.view import RunView
from tests.engine.run.test_ending import finished
from workbench.cli import output, runs
from workbench.cli.following import Follower, ending, exit_code, report, status_line


def test_a_line_says_how_far_a_run_is() -> None:
    view = RunView(state="running", step=412, max_steps=620, eta_seconds=42.0)
    view.latest = {"loss": 0.03124, "eval_loss": 0.5, "tokens_per_second": 9812.0}
    assert status_line(view) == "step 412 of 620 (66 %)  loss 0.0312  held-out 0.5000  9,812 tokens/s  0:42 left"
    assert status_line(RunView(state="running", step=3)) == "step 3"
    view.latest = {"loss": -3e-9}
    assert "loss 0.0000" in status_line(view), "GRPO's first loss is a nought of either sign"


def test_only_a_run_that_came_to_its_end_or_was_asked_to_stop_is_a_success() -> None:
    codes = {state: exit_code(RunView(state=state)) for state in ("finished", "stopped", "failed", "lost", "running")}
    assert codes == {"finished": 0, "stopped": 0, "failed": 1, "lost": 1, "running": 1}
    said = ending(RunView(state="stopped", id="my-0001", step=7), "my-0001")
    assert said.endswith("stopped at step 7: my-0001. `workbench resume my-0001` goes on.")


def begun(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[RunFolder, EventWriter]:
    """A run that goes on without a process, and what writes its events."""
    monkeypatch.setattr(launch, "unattended", lambda run: False)
    run = create(folder, "version: 1\n", {"name": "best", "method": "sft", "model": "builtin/tiny"})
    run.update_json(state="running")
    writer = EventWriter(run)
    writer.write("started", method="sft", max_steps=9)
    return run, writer


def test_what_comes_is_told_once_and_the_best_checkpoint_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, writer = begun(tmp_path, monkeypatch)

    def saved(step: int, **more: Any) -> None:
        writer.write("checkpoint", step=step, state="committed", path=f"checkpoint-{step}", bytes=2048, **more)

    writer.write("sample", step=1, prompt="Before?", completion="It was.")
    with open_view(run) as watch:
        follower = Follower(watch)
        writer.write("sample", step=2, prompt="When?", completion="Now.")
        writer.write("best", step=2, metric="eval_loss", value=0.5)
        saved(2)
        follower.until(lambda view: True)
        saved(4)
        follower.until(lambda view: True)
    told = [line for line in capsys.readouterr().err.splitlines() if "→" in line or line.startswith("checkpoint")]
    assert told == [
        "checkpoint at step 2 (2.0 KiB), the best so far",
        "step     2  When? → Now.",
        "checkpoint at step 4 (2.0 KiB)",
    ]


def test_what_arrived_at_a_hub_is_told_and_what_the_end_waits_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, writer = begun(tmp_path, monkeypatch)
    sent = {"repository": "me/model", "step": 4}
    with open_view(run) as watch:
        follower = Follower(watch)
        writer.write("metrics", step=9, loss=1.5)
        writer.write("upload", state="begun", bytes=2048, **sent)
        for _ in range(2):
            writer.write("upload", state="retry", message="the hub answers with error 500", **sent)
            follower.until(lambda view: True)
        writer.write("progress", what="Sending checkpoint-4", done=1024, total=2048, unit="bytes")
        follower.until(lambda view: True)
        assert "Sending checkpoint-4: 1.0 KiB of 2.0 KiB" in status_line(watch.view)
        writer.write("upload", state="arrived", url="https://hub/me/model/commit/1", **sent)
        follower.until(lambda view: True)
    told = [line for line in capsys.readouterr().err.splitlines() if "checkpoint-4" in line and "Sending" not in line]
    assert told == [
        "! checkpoint-4 has not arrived yet: the hub answers with error 500",
        "checkpoint-4 is at https://hub/me/model/commit/1",
    ]


def test_what_a_run_on_rewards_warns_of_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, writer = begun(tmp_path, monkeypatch)
    writer.write("started", method="grpo", max_steps=9)
    with open_view(run) as watch:
        follower = Follower(watch)
        for step in range(1, 9):
            writer.write("metrics", step=step, loss=0.0, reward=0.0, reward_std=0.0, frac_reward_zero_std=1.0)
            follower.until(lambda view: True)
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("!")]
    assert told == [f"! {NO_REWARD_YET}"]


def test_a_resume_begins_with_what_it_does_and_not_with_where_the_run_stood(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, writer = begun(tmp_path, monkeypatch)
    writer.write("metrics", step=4, loss=1.5)
    with open_view(run) as watch:
        Follower(watch, after=watch.view.segment).until(lambda view: True)
        assert "step 4" not in capsys.readouterr().err
        Follower(watch).until(lambda view: True)
        assert "step 4 of 9" in capsys.readouterr().err


def test_a_run_that_samples_answers_is_told_by_its_reward() -> None:
    """Its loss begins at nothing and says little."""
    latest = {"loss": -0.0151, "reward": 0.75, "eval_loss": 0.1, "eval_reward": 0.5, "tokens_per_second": 900.0}
    view = RunView(id="g-0001", state="running", step=3, max_steps=6, latest=latest)
    assert status_line(view).startswith("step 3 of 6 (50 %)  reward 0.7500  held-out 0.5000  900 tokens/s")
    over = RunView(id="g-0001", state="finished", step=6, latest=latest)
    assert ending(over, "g-0001").endswith("finished: g-0001, 6 steps, reward 0.7500")


def test_the_table_of_runs_fits_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "_is_terminal", lambda err: True)
    entry = {
        "state": "finished",
        "method": "sft",
        "model": "runs/dates-0002/checkpoints/checkpoint-120",
        "step": 480,
        "max_steps": 480,
    }
    rest = {
        "loss": 0.0058,
        "reward": None,
        "started": None,
        "cause": "",
        "silent_seconds": None,
        "restarts": 0,
        "diverged_at": None,
    }
    for width in ("80", "120"):
        monkeypatch.setenv("COLUMNS", width)
        runs.show([{"id": "dates-0001", **entry, **rest}])
        lines = click.unstyle(capsys.readouterr().out).splitlines()
        assert len(lines) == 2
        assert all(len(line) <= int(width) for line in lines), lines
        assert "checkpoint-120  480 of 480  0.0058  -" in lines[1]
        runs.show([{"id": "dates-0001", **entry, **rest}, {"id": "rules-0001", **entry, **rest, "reward": 0.25}])
        lines = click.unstyle(capsys.readouterr().out).splitlines()
        assert all(len(line) <= int(width) for line in lines), lines
        assert lines[0].endswith("STEP        LOSS OR REWARD  AGE")
        assert [line.split("480 of 480")[1].split("  ")[1] for line in lines[1:]] == ["0.0058", "reward 0.2500"]


def test_what_a_run_leaves_is_told_by_commands_that_work_from_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`make demo` leaves no `workbench` on PATH; a pipe gets the plain name, whoever reads it."""
    monkeypatch.setattr(output, "program", lambda: "my-env/bin/workbench")
    run, _ = finished(tmp_path)
    for terminal, called in ((True, "my-env/bin/workbench"), (False, "workbench")):
        monkeypatch.setattr(output, "_is_terminal", lambda err, terminal=terminal: terminal)
        with open_view(run) as watch:
            report(watch)
        told = click.unstyle(capsys.readouterr().err)
        assert f"  talk to it     {called} chat " in told
        assert f"  take it along  {called} export " in told
