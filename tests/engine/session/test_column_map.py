"""Picking columns: what is chosen, what is asked, what the draft says afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.data.column_map import mapped
from engine.data.rows import open_rows
from engine.errors import UsageError
from engine.session.column_map import ColumnMap
from engine.session.draft import Draft
from tests.tickets import Answered


def ask(do: str, *, on_progress: Any = None, **params: Any) -> Any:
    assert do == "mapped"
    return Answered(mapped(open_rows(params["path"]), params["columns"], params["format"]))


@pytest.fixture
def draft(tmp_path: Path) -> Draft:
    row = {"a": "2 + 2?", "b": "4", "c": "an aside"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    draft = Draft.new("demo")
    draft.set("data.train", [{"path": str(tmp_path / "rows.jsonl"), "weight": 2}])
    draft.unset("data.eval")
    return draft


def columns_of(draft: Draft) -> ColumnMap:
    columns = ColumnMap(draft, ask)
    columns.send()
    assert columns.poll()
    return columns


def said(columns: ColumnMap) -> list[list[str]]:
    assert columns.poll()
    return columns.found["rows"][0]["says"]


def test_turning_through_columns_shows_the_row_each_time_and_keeping_writes_them(draft: Draft) -> None:
    columns = columns_of(draft)
    columns.choose_format("prompt_completion")
    assert columns.poll()
    columns.turn("prompt", 1)
    assert columns.poll()
    columns.turn("completion", 1)
    assert said(columns) == [["prompt", "2 + 2?"], ["completion", "2 + 2?"]]
    columns.turn("completion", 1)
    assert said(columns) == [["prompt", "2 + 2?"], ["completion", "4"]]
    columns.turn("completion", -1)
    columns.turn("completion", 1)
    assert columns.changed
    assert draft.config.data.train[0].columns == {}, "nothing is written before it is kept"
    assert columns.keep()
    kept = draft.config.data.train[0]
    assert (kept.format, kept.columns, kept.weight) == ("prompt_completion", {"prompt": "a", "completion": "b"}, 2)
    assert not columns.keep()
    draft.undo()
    assert draft.config.data.train[0].columns == {}


def test_an_optional_part_may_have_no_column_and_a_format_forgets_parts_of_another(draft: Draft) -> None:
    columns = columns_of(draft)
    columns.choose_format("prompt_completion")
    for part, column in (("prompt", "a"), ("completion", "b"), ("system", "c")):
        columns.choose(part, column)
    assert columns.poll()
    columns.turn("system", 1)
    assert "system" not in columns.columns, "behind the last column comes none"
    columns.choose_format("tokens")
    assert columns.columns == {}
    with pytest.raises(UsageError, match="ranking: is no format that sft learns from"):
        columns.choose_format("ranking")


def test_a_format_of_another_method_is_turned_away_from(draft: Draft) -> None:
    draft.set("data.train", [{**draft.value("data.train")[0], "format": "preference"}])
    columns = columns_of(draft)
    columns.turn_format(1)
    assert columns.format == columns.formats[1]


def test_rows_that_are_others_by_now_get_no_columns_picked_for_the_old(draft: Draft) -> None:
    columns = columns_of(draft)
    columns.choose("prompt", "a")
    other = [{"path": "other.jsonl"}]
    draft.set("data.train", other)
    with pytest.raises(UsageError, match="source 1 was changed meanwhile"):
        columns.keep()
    assert draft.value("data.train") == other
    draft.undo()
    fewer = [{**draft.value("data.train")[0], "rows": 1}]
    draft.set("data.train", fewer)
    with pytest.raises(UsageError, match="source 1 was changed meanwhile"):
        columns.keep()
    assert draft.value("data.train") == fewer
    draft.set("data.train", [])
    with pytest.raises(UsageError, match="source 1 was changed meanwhile"):
        columns.keep()


def test_without_rows_there_is_nothing_to_pick() -> None:
    with pytest.raises(UsageError, match="Training data: there is none yet"):
        ColumnMap(Draft(), ask)
