"""A first look at the rows of a source: rows that will not do are answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.data.plan import source_rows
from engine.session.first_rows import condensed, first_rows_of
from workbench.panels.raw_rows import RawRows


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_look_says_format_and_shows_three_rows() -> None:
    Path("a.jsonl").write_text("".join(json.dumps({"question": f"q{n}", "answer": f"a{n}"}) + "\n" for n in range(9)))
    look = first_rows_of({"path": "a.jsonl", "columns": {"prompt": "question", "completion": "answer"}}, Path.cwd())
    assert look.format == "prompt_completion"
    assert look.count == 9
    assert look.rows == ("question: q0  answer: a0", "question: q1  answer: a1", "question: q2  answer: a2")
    assert ("prompt", "question") in look.used


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("empty.jsonl", b""),
        ("torn.json", b'[{"text": "a"}, {"te'),
        ("latin.jsonl", b'{"text": "\xe9"}\n'),
        ("no.zip", b"PK"),
    ],
)
def test_a_bad_file_is_a_problem_in_words_and_no_exception(name: str, content: bytes) -> None:
    Path(name).write_bytes(content)
    look = first_rows_of({"path": name}, Path.cwd())
    assert look.problems
    assert name in look.problems[0]


def test_a_missing_file_is_named_and_a_hub_name_is_left_to_launch() -> None:
    assert "no such file" in first_rows_of({"path": "./gone.jsonl"}, Path.cwd()).problems[0]
    elsewhere = first_rows_of({"path": "s3://bucket/rows.jsonl"}, Path.cwd())
    assert elsewhere.later
    assert "fetched when its rows are shown or counted" in elsewhere.problems[0]
    assert first_rows_of({"path": "someone/something"}, Path.cwd()).later
    below = first_rows_of({"path": "a/folder/below"}, Path.cwd())
    assert (below.later, "no such file" in below.problems[0]) == (False, True), "the hub's names have two parts"


def test_the_built_in_rows_that_are_shown_are_those_that_are_trained() -> None:
    trained = source_rows("builtin/dates", seed=42)
    shown = first_rows_of({"path": "builtin/dates"}, Path.cwd(), seed=42).rows
    assert shown == tuple(condensed(trained[number]) for number in range(len(shown)))


def test_a_source_of_which_only_the_first_rows_are_used_is_followed_by_the_next_one() -> None:
    for name in ("a", "b"):
        Path(f"{name}.jsonl").write_text("".join(json.dumps({"text": f"{name}{n}"}) + "\n" for n in range(9)))
    rows = RawRows([{"path": "a.jsonl", "rows": 2}, {"path": "b.jsonl"}], Path.cwd())
    rows.wait(3, 5.0)
    assert [rows.row(number) for number in range(4)] == [{"text": text} for text in ("a0", "a1", "b0", "b1")]
    rows.close()


def test_a_row_is_condensed_to_its_words() -> None:
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None}], "id": 7}
    assert condensed(row) == "messages: user · Hi · assistant  id: 7"
