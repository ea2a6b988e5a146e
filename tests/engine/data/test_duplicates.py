"""Rows that say what an earlier one says are left out on request, counted, and named in the preview."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.config.data import DataSource
from engine.data.counting import count
from engine.data.prepare import prepare
from engine.data.preview import preview

Write = Callable[..., Path]
Config = Callable[..., Any]


def _chat(question: str, answer: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **more}


def test_equal_rows_are_left_out_counted_and_shown(write: Write, make_config: Config, minimind: Any) -> None:
    first = write([_chat("a?", "b"), _chat("a?", "c"), _chat("a?", "b", id=7), _chat("A?", "b")], "first.jsonl")
    # The same in another format, and a source that is used twice on purpose.
    said = [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "c"}]
    second = write([{"conversations": said}, _chat("d?", "e") | {"conversations": None}], "second.jsonl")
    second.write_text(second.read_text().splitlines()[0] + "\n")
    third = write([_chat("d?", "e"), _chat("d?", "e")], "third.jsonl")
    sources = [DataSource(path=str(path), weight=2 if path is third else 1) for path in (first, second, third)]
    config = make_config(source=sources, deduplicate="exact")
    prepared = prepare(config, minimind)
    assert [row["row"] for row in prepared.dataset] == [0, 1, 3, 5, 5]
    assert prepared.facts.duplicates == 3
    assert prepared.warnings == ("3 rows say exactly what an earlier one says and are left out",)
    assert count(config, minimind, "train", sample=100)["duplicates"] == 3
    reasons = [row.get("left_out", "") for row in preview(config, minimind, count=7)["rows"]]
    assert [reason.removeprefix("it says exactly what row ") for reason in reasons] == [
        "", "", "0 says", "", "1 says", "", "5 says"
    ]  # fmt: skip
    every = prepare(make_config(source=sources), minimind)
    assert len(every.dataset) == 9
    assert every.warnings == ()


def test_no_equal_row_is_held_out_beside_its_other(write: Write, make_config: Config, minimind: Any) -> None:
    rows = [_chat(f"{number % 10}?", "b") for number in range(40)]
    config = make_config(write(rows), deduplicate="exact", val_set_size=0.2)
    sides = [prepare(config, minimind, split) for split in ("train", "eval")]
    assert [len(side.dataset) for side in sides] == [8, 2]
    assert [side.facts.duplicates for side in sides] == [30, 0]
    assert sides[1].warnings == ()


def test_what_rewards_read_is_compared_too(write: Write, make_config: Config, minimind: Any) -> None:
    rows = [{"prompt": "a?", "answer": "b", "hard": False}, {"prompt": "a?", "answer": "b", "hard": True}]
    config = make_config(write([*rows, rows[0]]), method="grpo", deduplicate="exact")
    assert [row["row"] for row in prepare(config, minimind).dataset] == [0, 1]
