"""What rows say under a choice of columns: the parts of their format, where each is read from, and what then stands there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.data.column_map import mapped
from engine.data.rows import open_rows

Write = Callable[..., Path]
ASKED = [{"frage": f"{n} + {n}?", "antwort": str(2 * n), "note": "sum"} for n in range(5)]


def _columns(found: dict[str, Any]) -> dict[str, str]:
    return {part["name"]: part["column"] for part in found["parts"]}


def test_rows_follow_the_columns_that_are_picked(write: Write) -> None:
    rows = open_rows(write(ASKED))
    unknown = mapped(rows, {}, None)
    assert unknown["format"] is None
    assert "fit no known format" in unknown["problem"]
    assert unknown["columns"] == [["frage", "0 + 0?"], ["antwort", "0"], ["note", "sum"]]
    assert unknown["rows"][0]["says"][0][1].startswith('{"frage"'), "the row as it stands, to pick by"

    found = mapped(rows, {"prompt": "frage", "completion": "antwort"}, None)
    assert found["format"] == "prompt_completion"
    assert (_columns(found)["prompt"], _columns(found)["completion"], _columns(found)["system"]) == (
        "frage",
        "antwort",
        "",
    )
    assert [row["says"] for row in found["rows"]] == [
        [["prompt", f"{n} + {n}?"], ["completion", str(2 * n)]] for n in range(3)
    ]
    swapped = mapped(rows, {"prompt": "antwort", "completion": "frage"}, None)
    assert swapped["rows"][2]["says"] == [["prompt", "4"], ["completion", "2 + 2?"]]


def test_a_part_without_its_column_says_so_in_each_row(write: Write) -> None:
    found = mapped(open_rows(write(ASKED)), {"prompt": "frage"}, "prompt_completion")
    assert [part["needed"] for part in found["parts"][:2]] == [True, True]
    assert _columns(found)["completion"] == ""
    assert all("column completion" in row["problem"] and not row["says"] for row in found["rows"])


def test_turns_thinking_calls_tools_and_verdicts_are_told_by_their_part(write: Write) -> None:
    turns = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "", "thinking": "look", "tool_calls": [{"name": "at", "arguments": {"x": 1}}]},
    ]
    chat = mapped(open_rows(write([{"messages": turns, "tools": [{"name": "at"}]}], "a.jsonl")), {}, None)
    assert chat["rows"][0]["says"] == [
        ["tools", "at"],
        ["user", "weather?"],
        ["assistant, thinking", "look"],
        ["assistant, call", '{"name": "at", "arguments": {"x": 1}}'],
    ]
    rated = mapped(open_rows(write([{"prompt": "p", "completion": "c", "label": False}], "b.jsonl")), {}, None)
    assert rated["rows"][0]["says"][-1] == ["label", "a bad answer"]
    pair = mapped(open_rows(write([{"prompt": "p", "chosen": "c", "rejected": "r"}], "c.jsonl")), {}, None)
    assert [label for label, _ in pair["rows"][0]["says"]] == ["prompt", "chosen", "rejected"]
    steps = {"prompt": "p", "completions": ["one", "two"], "labels": [True, False]}
    judged = mapped(open_rows(write([steps], "d.jsonl")), {}, None)
    assert judged["rows"][0]["says"][-2:] == [["good step", "one"], ["bad step", "two"]]
