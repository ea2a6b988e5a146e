"""The guided first run as a command: a real rehearsal on own rows that stops by itself, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from engine.config.files import load
from engine.errors import WorkbenchError
from engine.run import launch
from engine.run.store import find
from workbench.cli.guide import command

ROWS = [
    ("What colour is the ferry?", "White above, blue below."),
    ("When does the first boat leave?", "At 6:40, on Sundays at 7:15."),
    ("Can I take my dog?", "Yes, on a lead, for half the fare."),
    ("How long is the crossing?", "Fourteen minutes in calm water."),
    ("Is there food on board?", "Coffee and rolls until ten."),
]


def test_a_rehearsal_learns_own_rows_and_stops_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "".join(json.dumps({"prompt": prompt, "completion": answer}) + "\n" for prompt, answer in ROWS)
    Path("rows.jsonl").write_text(text)
    done = CliRunner().invoke(command, ["rows.jsonl", "--json", "--save", "mine.yaml"], standalone_mode=False)
    assert done.exception is None, done.output
    said = json.loads(done.stdout)
    assert done.return_value == 0
    assert said["learned"]
    assert said["step"] < 200
    by_step: dict[int, dict[str, str]] = {}
    for sample in said["samples"]:
        by_step.setdefault(sample["step"], {})[sample["prompt"]] = sample["completion"]
    assert dict(ROWS[:3]) in by_step.values()
    run = find(said["id"], tmp_path / "runs")
    launch.settle(run)
    assert run.state == "stopped"
    assert list(run.checkpoints.iterdir())
    assert load("mine.yaml").mapping["data"]["train"] == [{"path": str(tmp_path / "rows.jsonl")}]


def test_nothing_is_started_for_rows_that_cannot_be_rehearsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.jsonl").write_text('{"text": "Only words."}\n' * 3)
    Path("mine.yaml").write_text("version: 1\n")
    for words, message in (
        (["text.jsonl"], "row 1 holds no question with an answer in words, but plain text. For such rows"),
        (["gone.jsonl"], "gone.jsonl: must be a file of questions and answers; got nothing there."),
        (["--save", "mine.yaml"], "--save mine.yaml: must be a new file; this one exists and is kept."),
    ):
        with pytest.raises(WorkbenchError, match=message.replace(".", r"\.")) as refused:
            CliRunner().invoke(command, words, standalone_mode=False, catch_exceptions=False)
        assert refused.value.hint
    assert not Path("runs").exists()
    assert Path("mine.yaml").read_text() == "version: 1\n"
