"""`workbench preview`, as a command: what it prints, for people and for machines, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Write = Callable[..., Path]


@pytest.fixture
def config_file(shared_data: Path, tmp_path: Path) -> Write:
    def write(rows: list[Any], data: str = "", method: str = "sft", name: str = "rows.jsonl") -> Path:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        text = (
            "version: 1\n"
            f"model:\n  name: {shared_data}/weights/tinystories-llama-260k\n"
            f"  tokenizer: {shared_data}/tokenizers/minimind\n"
            f"method:\n  kind: {method}\n"
            f"data:\n  train:\n    - path: {json.dumps(name)}\n{data}"
        )
        path = tmp_path / "run.yaml"
        path.write_text(text, "utf-8")
        return path

    return write


def _run(*arguments: Any, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "workbench", "preview", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=250,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )


def _chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def test_json_has_the_shape_that_scripts_read_also_of_rows_named_beside_the_file(
    config_file: Write, tmp_path: Path
) -> None:
    rows = [_chat("a?", "one"), _chat("b?", "two")]
    (tmp_path / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    beside = f"data.train.0.path={tmp_path.name}/more.jsonl"
    done = _run(config_file([_chat("c?", "three")]), beside, "--rows", 2, "--json", cwd=tmp_path.parent)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"method", "rows", "fingerprint"} <= set(found)
    assert [row["index"] for row in found["rows"]] == [0, 1]
    part = found["rows"][1]["parts"]["input"]
    assert all(set(token) == {"id", "text", "trained"} for token in part)
    assert "".join(token["text"] for token in part if token["trained"]) == "two<|im_end|>"
    assert (found["rows"][0]["truncated"], found["rows"][0]["images"]) == (False, [])


def test_people_see_counts_and_marked_tokens_and_which_settings_did_nothing(config_file: Write) -> None:
    rows = [_chat("[bold]a[/]?", "one \x1b[31m[/red]"), _chat("b?", "two")]
    done = _run(config_file(rows), "data.max_lenght=9", "--row", 0, "--rows", 1)
    assert done.returncode == 0, done.stderr
    assert "x data.max_lenght: must be a setting of data" in done.stderr
    assert "columns messages: messages (OpenAI) (2 rows)" in done.stdout
    assert "row 0 of 2:" in done.stdout
    assert "‹one ␛[31m[/red]<|im_end|>›" in done.stdout
    assert "[bold]a[/]?" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--row", "9"], 1, "there is no row 9; the rows are 0 to 0"),
        (["--row", "1", "--random"], 2, "exclude each other"),
        (["--rows", "0"], 2, "--rows"),
        (["max_length"], 2, "must be of the form section.setting=value"),
    ],
)
def test_wrong_calls_say_why(config_file: Write, arguments: list[str], code: int, sentence: str) -> None:
    done = _run(config_file([_chat("a?", "one")]), *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_a_pair_says_how_long_its_longest_side_is(config_file: Write) -> None:
    pair = {"prompt": "2 + 2?", "chosen": "4, of course, as anyone can see", "rejected": "5"}
    path = config_file([pair], method="dpo")
    found = json.loads(_run(path, "--json").stdout)["rows"][0]
    sides = [len(found["parts"]["prompt"]) + len(found["parts"][side]) for side in ("chosen", "rejected")]
    both = sum(len(part) for part in found["parts"].values())
    assert max(sides) < both
    assert f"{both} tokens (longest side {max(sides)})" in _run(path).stdout


def test_a_search_in_vain_and_worst_rows_that_are_not_there_are_said(config_file: Write) -> None:
    path = config_file([_chat("2 + 2?", "4")])
    for arguments, words in (
        (("--search", "zebra"), "No row holds 'zebra'."),
        (("--worst", "masked"), "Every row has something to learn."),
        (("--worst", "truncated"), "No row is cut."),
    ):
        done = _run(path, *arguments)
        assert (done.returncode, done.stdout.splitlines()[-1]) == (0, words)
    done = _run(path, "--search", "")
    assert (done.returncode, done.stderr.strip()) == (1, "Error: a search needs some text")


def test_a_config_that_is_not_there_and_rows_that_are_bad(config_file: Write, tmp_path: Path) -> None:
    done = _run(tmp_path / "no.yaml")
    assert done.returncode == 2
    assert "no.yaml" in done.stderr
    done = _run(config_file([_chat("a?", "one"), {"messages": 7}]))
    assert done.returncode == 1
    assert "rows.jsonl:2: column messages must hold a list of messages" in done.stderr


def test_a_terminal_gets_colour_and_underline_and_no_markup() -> None:
    from workbench.cli.preview import marked

    part = [{"id": 1, "text": "[b]q\x1b[0m", "trained": False}, {"id": 2, "text": "answer", "trained": True}]
    text = marked(part, colour=True)
    assert text.plain == "[b]q␛[0manswer"
    assert [(span.start, span.end, str(span.style)) for span in text.spans] == [(8, 14, "green underline")]


@pytest.mark.slow  # the hub's client tries again for half a minute and more
def test_a_hub_that_cannot_be_reached_is_one_sentence_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    (tmp_path / "rows.jsonl").write_text(json.dumps(_chat("a", "b")) + "\n")
    (tmp_path / "run.yaml").write_text("model:\n  name: no-org/no-model\ndata:\n  train:\n    - path: rows.jsonl\n")
    done = _run(tmp_path / "run.yaml")
    assert done.returncode == 1
    assert "no-org/no-model is neither a folder here nor to be had from the hub" in done.stderr
    assert "Check the name and the network, or download it on another machine" in done.stderr
    assert "Traceback" not in done.stderr
