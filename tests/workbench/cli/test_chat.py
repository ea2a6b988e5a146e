"""`workbench chat RUN --prompt`: both answers in one call, one sentence for what cannot be, JSON on every outcome."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.run.store import RunFolder
from tests.chats import QUESTION, make_run
from tests.warm import command


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return make_run(tmp_path_factory.mktemp("runs"))


def test_both_answers_as_json_and_rows_beside(run: RunFolder, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    asked = ["--prompt", QUESTION, "--prompt", "And then?", "--max-new-tokens", "6", "--device", "cpu"]
    ended = command("chat", str(run.path), *asked, "--json", "--save", str(rows), timeout=240)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert [side["checkpoint"] for side in found["sides"]] == [10, None]
    assert [turn["prompt"] for turn in found["turns"]] == [QUESTION, "And then?"]
    first, second = (turn["answers"] for turn in found["turns"])
    assert first[0]["ids"] != first[1]["ids"]
    assert all(answer["tokens"] <= 6 and answer["problem"] is None for answer in (*first, *second))
    assert second[0]["prompt_tokens"] > first[0]["prompt_tokens"], "the second turn reads the first"
    assert found["saved"] == len(rows.read_text("utf-8").splitlines()) == 2


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["--base", "--tuned", "--prompt", "x"], 2, "--base excludes --tuned"),
        (["--checkpoint", "7", "--prompt", "x"], 2, "no whole checkpoint 7; its whole ones are 10."),
        (["--temperature", "-1", "--prompt", "x"], 2, "temperature: must be a number from 0 to 100; got -1.0."),
        (["--device", "tpu", "--prompt", "x"], 2, "--device: must be auto or cpu; got tpu."),
        (["--tools", "nowhere.json", "--prompt", "x"], 2, "--tools: nowhere.json cannot be read"),
        (["--text", "x", "--prompt", "x"], 2, "--text: must be left out for a model that answers."),
        (["--save", "x.jsonl"], 2, "--save: must stand beside --prompt."),
    ],
)
def test_a_wrong_call_is_one_sentence_and_a_document(
    run: RunFolder, words: list[str], code: int, sentence: str
) -> None:
    ended = command("chat", str(run.path), *words, "--json")
    assert ended.returncode == code
    error = json.loads(ended.stdout)["error"]
    assert sentence in error["message"]
    assert ended.stderr.count("Error: ") == 1
