"""Rows that hold what nobody can train on: each is located by file and line, left out and counted where asked, shown safely."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.data.prepare import prepare
from engine.data.preview import preview
from engine.errors import DataError

GOOD = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
TOKENS = {"input_ids": [5, 6, 7], "labels": [5, 6, 7]}
PAIR = {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}


def said(*turns: tuple[Any, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


BAD: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "a column is missing": ("sft", GOOD, {"prompt": "2 + 2?"}, "messages"),
    "a column holds another kind": ("sft", GOOD, {"messages": 7}, "messages"),
    "an unknown role": ("sft", GOOD, said(("wizard", "Hi."), ("assistant", "4")), "wizard"),
    "a role that turns the line": ("sft", GOOD, said(("\u202eresu", "Hi."), ("assistant", "4")), "role"),
    "no turns": ("sft", GOOD, {"messages": []}, "empty|turn|messages"),
    "a turn without content": ("sft", GOOD, {"messages": [{"role": "user"}, {"role": "assistant", "content": "4"}]}, "content"),
    "a turn of numbers": ("sft", GOOD, said(("user", 7), ("assistant", "4")), "must hold text"),
    "fewer labels than ids": ("sft", TOKENS, {"input_ids": [5, 6, 7], "labels": [5, 6]}, "labels"),
    "an id outside the vocabulary": ("sft", TOKENS, {"input_ids": [5, 99_999_999], "labels": [5, 6]}, "99,999,999|99999999"),
    "a label outside the vocabulary": ("sft", TOKENS, {"input_ids": [5, 6], "labels": [5, 99_999_999]}, "99,999,999|99999999"),
    "a negative id": ("sft", TOKENS, {"input_ids": [5, -3], "labels": [5, 6]}, "-3"),
    "a pair without its worse side": ("dpo", PAIR, {"prompt": "2 + 2?", "chosen": "4"}, "rejected|preference pair"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_located_and_left_out_where_asked(
    name: str, write: Callable[..., Path], make_config: Callable[..., Any], minimind: Any
) -> None:
    method, good, bad, words = BAD[name]
    path = write([good, bad, good])
    with pytest.raises(DataError) as told:
        prepare(make_config(path, method=method), minimind)
    assert "rows.jsonl:2" in told.value.full_message
    assert any(each in told.value.full_message for each in words.split("|")), told.value.full_message
    assert "\u202e" not in told.value.full_message
    config = make_config(path, method=method, on_bad_row="skip")
    prepared = prepare(config, minimind)
    assert prepared.counts["bad"] == 1
    assert len(prepared.dataset) == 2
    shown = preview(config, minimind, {"kind": "index", "index": 1})["rows"][0]["error"]
    assert any(each in shown for each in words.split("|"))
    assert "\u202e" not in shown


def test_a_row_of_a_file_without_lines_is_named_once(
    tmp_path: Path, make_config: Callable[..., Any], minimind: Any
) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "tokens.parquet"
    rows = [TOKENS, {"input_ids": [5, 6, 7], "labels": [5, 6]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    with pytest.raises(DataError) as told:
        prepare(make_config(path), minimind)
    assert str(told.value).startswith(f"{path}: row 1: ")
    assert str(told.value).count("row 1") == 1
