"""What is printed while a run goes: each thing once, with what matters of it, and an exit code for scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.run import launch
from engine.run.events import EventWriter
from engine.run.index import open_view
from engine.run.store import create
from engine.run.view import RunView
from workbench.cli.following import Follower, ending, exit_code, status_line


def test_a_line_says_how_far_a_run_is() -> None:
    view = RunView(state="running", step=412, max_steps=620, eta_seconds=42.0)
    view.latest = {"loss": 0.03124, "eval_loss": 0.5, "tokens_per_second": 9812.0}
    assert status_line(view) == "step 412 of 620 (66 %)  loss 0.0312  held-out 0.5000  9,812 tokens/s  0:42 left"
    assert status_line(RunView(state="running", step=3)) == "step 3"


def test_only_a_run_that_came_to_its_end_or_was_asked_to_stop_is_a_success() -> None:
    codes = {state: exit_code(RunView(state=state)) for state in ("finished", "stopped", "failed", "lost", "running")}
    assert codes == {"finished": 0, "stopped": 0, "failed": 1, "lost": 1, "running": 1}
    said = ending(RunView(state="stopped", id="my-0001", step=7), "my-0001")
    assert said.endswith("stopped at step 7: my-0001. `workbench resume my-0001` goes on.")


def test_what_comes_is_told_once_and_the_best_checkpoint_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "unattended", lambda run: False)
    run = create(tmp_path, "version: 1\n", {"name": "best", "method": "sft", "model": "builtin/tiny"})
    run.update_json(state="running")
    writer = EventWriter(run)
    writer.write("started", method="sft", max_steps=9)

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
