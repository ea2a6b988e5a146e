"""`workbench preview`, as a command: what it prints, for people and for machines, and its exit codes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.client import Inspector
from tests import warm

Write = Callable[..., Path]
Preview = Callable[..., subprocess.CompletedProcess[str]]


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


@pytest.fixture(scope="module")
def inspector() -> Iterator[Inspector]:
    """One for all: a real process that imports the tokenizers once; each question still gets a child of its own."""
    with Inspector() as shared:
        yield shared


@pytest.fixture
def preview(inspector: Inspector) -> Preview:
    """`workbench preview` with these words, from its entry to its exit code, here."""

    def run(*words: Any) -> subprocess.CompletedProcess[str]:
        with warm.sharing(inspector):
            return warm.here("preview", *map(str, words))

    return run


def _chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def test_json_has_the_shape_that_scripts_read_also_of_rows_named_beside_the_file(
    config_file: Write, tmp_path: Path
) -> None:
    rows = [_chat("a?", "one"), _chat("b?", "two")]
    (tmp_path / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    beside = f"data.train.0.path={tmp_path.name}/more.jsonl"
    words = [str(config_file([_chat("c?", "three")])), beside, "--rows", "2", "--json"]
    done = warm.command("preview", *words, cwd=tmp_path.parent, timeout=250)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"method", "rows", "fingerprint"} <= set(found)
    assert [row["index"] for row in found["rows"]] == [0, 1]
    part = found["rows"][1]["parts"]["input"]
    assert all(set(token) == {"id", "text", "trained"} for token in part)
    assert "".join(token["text"] for token in part if token["trained"]) == "two<|im_end|>"
    assert (found["rows"][0]["truncated"], found["rows"][0]["images"]) == (False, [])


def test_people_see_counts_and_marked_tokens_and_which_settings_did_nothing(
    preview: Preview, config_file: Write
) -> None:
    rows = [_chat("[bold]a[/]?", "one \x1b[31m[/red]"), _chat("b?", "two")]
    done = preview(config_file(rows), "data.max_lenght=9", "--row", 0, "--rows", 1)
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
def test_wrong_calls_say_why(
    preview: Preview, config_file: Write, arguments: list[str], code: int, sentence: str
) -> None:
    done = preview(config_file([_chat("a?", "one")]), *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_a_pair_says_how_long_its_longest_side_is(preview: Preview, config_file: Write) -> None:
    pair = {"prompt": "2 + 2?", "chosen": "4, of course, as anyone can see", "rejected": "5"}
    path = config_file([pair], method="dpo")
    found = json.loads(preview(path, "--json").stdout)["rows"][0]
    sides = [len(found["parts"]["prompt"]) + len(found["parts"][side]) for side in ("chosen", "rejected")]
    both = sum(len(part) for part in found["parts"].values())
    assert max(sides) < both
    assert f"{both} tokens (longest side {max(sides)})" in preview(path).stdout


def test_a_search_in_vain_and_worst_rows_that_are_not_there_are_said(preview: Preview, config_file: Write) -> None:
    path = config_file([_chat("2 + 2?", "4")])
    for arguments, words in (
        (("--search", "zebra"), "No row holds 'zebra'."),
        (("--worst", "masked"), "Every row has something to learn."),
        (("--worst", "truncated"), "No row is cut."),
    ):
        done = preview(path, *arguments)
        assert (done.returncode, done.stdout.splitlines()[-1]) == (0, words)
    done = preview(path, "--search", "")
    assert (done.returncode, done.stderr.strip()) == (1, "Error: a search needs some text")


def test_a_config_that_is_not_there_and_rows_that_are_bad(preview: Preview, config_file: Write, tmp_path: Path) -> None:
    done = preview(tmp_path / "no.yaml")
    assert done.returncode == 2
    assert "no.yaml" in done.stderr
    done = preview(config_file([_chat("a?", "one"), {"messages": 7}]))
    assert done.returncode == 1
    assert "rows.jsonl:2: column messages must hold a list of messages" in done.stderr


def test_a_terminal_gets_colour_and_underline_and_a_pipe_gets_marks() -> None:
    from workbench.cli.preview import marked

    part = [{"id": 1, "text": "[b]q", "trained": False}, {"id": 2, "text": "answer", "trained": True}]
    assert [(text, dict(look)) for text, look in marked(part, colour=True)] == [
        ("[b]q", {}),
        ("answer", {"fg": "green", "underline": True}),
    ]
    assert "".join(text for text, _ in marked(part, colour=False)) == "[b]q‹answer›"


@pytest.mark.slow  # the hub's client tries again for half a minute and more
def test_a_hub_that_cannot_be_reached_is_one_sentence_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    (tmp_path / "rows.jsonl").write_text(json.dumps(_chat("a", "b")) + "\n")
    (tmp_path / "run.yaml").write_text("model:\n  name: no-org/no-model\ndata:\n  train:\n    - path: rows.jsonl\n")
    done = warm.command("preview", str(tmp_path / "run.yaml"), timeout=250)
    assert done.returncode == 1
    assert "no-org/no-model is neither a folder here nor to be had from the hub" in done.stderr
    assert "Check the name and the network, or download it on another machine" in done.stderr
    assert "Traceback" not in done.stderr
