"""`workbench evaluate RUN`: what it prints, keeps and refuses, as its person calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.run.evaluations import kept
from engine.run.store import RunFolder
from tests.chats import make_run
from tests.warm import command


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return make_run(tmp_path_factory.mktemp("runs"), steps=(10, 20))


def test_a_checkpoint_beside_its_base_printed_and_kept(run: RunFolder, tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "What is 3 March 2021 in ISO form?"},
        {"role": "assistant", "content": "2021-03-03"},
    ]
    (tmp_path / "unseen.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 3)
    asked = ["evaluate", str(run.path), "--data", "unseen.jsonl", "--base", "--checkpoint", "10", "--device", "cpu"]
    ended = command(*asked, "--json", cwd=tmp_path, timeout=240)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert (found["ok"], found["run"], found["step"], found["rows"]) == (True, run.id, 10, 3)
    assert found["data"] == str(tmp_path / "unseen.jsonl")
    assert found["metrics"].keys() == found["base"].keys() >= {"eval_loss", "eval_mean_token_accuracy"}
    assert found["metrics"]["eval_loss"] != found["base"]["eval_loss"]
    (record,) = kept(run)
    assert found == {"ok": True, "run": run.id, **record, "path": str(run.path / "evaluations.jsonl")}
    from workbench.cli.evaluate import lines

    head, sides, loss, *_ = lines(run.id, record)
    assert head == f"{run.id}, 3 rows of {tmp_path / 'unseen.jsonl'}"
    assert sides.split() == ["checkpoint-10", "base"]
    assert loss.split()[:2] == ["held-out", "loss"]


def test_a_wrong_call_is_one_sentence_and_keeps_nothing(run: RunFolder, tmp_path: Path) -> None:
    (run.path / "evaluations.jsonl").unlink(missing_ok=True)
    for words, code, sentence in (
        (["--checkpoint", "7"], 2, "has no whole checkpoint 7"),
        (["--checkpoint", "best"], 2, "knows no best one"),
        (["--data", "nowhere.jsonl"], 2, "--data: must be a file with rows; got nothing there"),
        (["--device", "tpu"], 2, "--device: must be auto or cpu; got tpu."),
        ([], 1, "held no rows out"),
    ):
        ended = command("evaluate", str(run.path), *words, "--json", cwd=tmp_path, timeout=240)
        assert (ended.returncode, sentence in json.loads(ended.stdout)["error"]["message"]) == (code, True), (
            ended.stderr
        )
        assert ended.stderr.count("Error: ") == 1
    assert kept(run) == []
