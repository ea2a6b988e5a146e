"""`data.val_set_size`: so many rows are held out, drawn by the seed, and no prompt stands on both sides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.data.counting import count
from engine.data.plan import plan_of
from engine.data.prepare import prepare
from engine.data.preview import preview
from engine.errors import DataError

Write = Callable[..., Path]
Config = Callable[..., Any]


def _chat(question: str, answer: str, system: str = "") -> dict[str, Any]:
    first = [{"role": "system", "content": system}] if system else []
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": [*first, *turns]}


def _rows(number: int) -> list[dict[str, Any]]:
    return [_chat(f"question {place}?", f"answer {place}") for place in range(number)]


def _sides(config: Any, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Numbers of the rows trained on and of those held out."""
    found = [list(prepare(config, tokenizer, split).dataset["row"]) for split in ("train", "eval")]
    return found[0], found[1]


@pytest.mark.parametrize(("size", "held"), [(0.1, 4), (0.26, 10), (7, 7), (1, 1), (0.001, 1)])
def test_so_many_rows_are_held_out_and_all_others_trained_on(
    write: Write, make_config: Config, minimind: Any, size: float, held: int
) -> None:
    trained, out = _sides(make_config(write(_rows(40)), val_set_size=size), minimind)
    assert len(out) == held
    assert sorted(trained + out) == list(range(40))


def test_the_seed_draws_them_whatever_is_in_the_cache(
    write: Write, make_config: Config, minimind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write(_rows(60))
    config = make_config(rows, val_set_size=0.2)
    before = _sides(config, minimind)
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "empty"))
    assert _sides(config, minimind) == before
    config.run.seed = 2
    assert _sides(config, minimind)[1] != before[1]
    config.run.seed = 1
    assert len(_sides(make_config(rows, val_set_size=0.3), minimind)[1]) == 18
    assert len(prepare(make_config(rows), minimind).dataset) == 60


def test_rows_of_one_prompt_stay_together(write: Write, make_config: Config, minimind: Any) -> None:
    rows = [_chat(f"question {place % 10}?", f"answer {place}", f"system {place}") for place in range(40)]
    trained, out = _sides(make_config(write(rows), val_set_size=8), minimind)
    assert len(out) == 8
    assert not {place % 10 for place in trained} & {place % 10 for place in out}


def test_pairs_of_one_prompt_stay_together(write: Write, make_config: Config, minimind: Any) -> None:
    rows = [
        {"prompt": f"question {place // 3}?", "chosen": f"good {place}", "rejected": f"bad {place}"}
        for place in range(30)
    ]
    config = make_config(write(rows), method="dpo", val_set_size=0.25)
    trained, out = _sides(config, minimind)
    assert len(out) == 6, "two prompts of three pairs; a third one would be more than asked for"
    assert not {place // 3 for place in trained} & {place // 3 for place in out}
    warnings = prepare(config, minimind, "eval").warnings
    assert warnings == ("data.val_set_size: 6 rows are held out instead of 8, as rows with one prompt stay together",)


def test_a_row_that_stands_twice_is_on_one_side(write: Write, make_config: Config, minimind: Any) -> None:
    rows = [{"text": f"text {place % 20}"} for place in range(40)]
    trained, out = _sides(make_config(write(rows), method="pretrain", val_set_size=0.5), minimind)
    assert len(out) == 20
    assert not {place % 20 for place in trained} & {place % 20 for place in out}


def test_a_source_of_weight_two_is_never_on_both_sides(write: Write, make_config: Config, minimind: Any) -> None:
    from engine.config.data import DataSource

    source = [DataSource(path=str(write(_rows(20))), weight=2.5)]
    trained, out = _sides(make_config(source=source, val_set_size=5), minimind)
    assert len(set(out)) == len(out) == 5
    assert not set(trained) & set(out)
    assert all(trained.count(place) >= 2 for place in set(range(20)) - set(out))


@pytest.mark.parametrize(
    ("rows", "size", "sentence"),
    [
        (_rows(5), 5, "data.val_set_size: 5 leaves none of 5 rows to train on"),
        ([_chat("same?", str(place)) for place in range(6)], 2, "at least 6 rows with the same prompt belong together"),
    ],
)
def test_what_cannot_be_held_out_is_told(
    write: Write, make_config: Config, minimind: Any, rows: Any, size: float, sentence: str
) -> None:
    config = make_config(write(rows), val_set_size=size)
    for split in ("train", "eval"):
        with pytest.raises(DataError) as caught:
            prepare(config, minimind, split)
        assert sentence in caught.value.full_message


def test_the_preview_shows_them_as_held_out(write: Write, make_config: Config, minimind: Any) -> None:
    config = make_config(write(_rows(20)), val_set_size=4)
    _, out = _sides(config, minimind)
    shown = preview(config, minimind, {"kind": "index", "index": 0}, 20)
    left = {row["index"]: row.get("left_out", "") for row in shown["rows"]}
    assert {index for index, words in left.items() if "held out by data.val_set_size" in words} == set(out)
    assert all(not words for index, words in left.items() if index not in out)
    assert shown["fingerprint"] == prepare(config, minimind).fingerprint
    held = preview(config, minimind, {"kind": "index", "index": 0}, 20, "eval")
    assert [row["index"] for row in held["rows"]] == out
    assert not any(row.get("left_out") for row in held["rows"])
    after = preview(config, minimind, {"kind": "index", "index": out[1]}, 1, "eval")
    assert [row["index"] for row in after["rows"]] == [out[1]]
    for wanted in ({"kind": "random"}, {"kind": "worst", "by": "longest"}, {"kind": "search", "text": "QUESTION"}):
        found = preview(config, minimind, wanted, 6, "eval")
        assert found["rows"]
        assert {row["index"] for row in found["rows"]} <= set(out)


@pytest.mark.parametrize("sample", [None, 16, 512])
def test_counts_are_those_of_each_side(write: Write, make_config: Config, minimind: Any, sample: int | None) -> None:
    config = make_config(write(_rows(40)), val_set_size=0.25)
    assert count(config, minimind, "train", sample=sample)["rows"] == 30
    assert count(config, minimind, "eval", sample=sample)["eval_rows"] == 10


def test_a_bad_row_is_told_of_where_it_is_trained(write: Write, make_config: Config, minimind: Any) -> None:
    rows = [*_rows(10), {"messages": [{"role": "user"}]}]
    config = make_config(write(rows), val_set_size=2, on_bad_row="skip")
    assert prepare(config, minimind).counts["bad"] == 1
    assert prepare(config, minimind, "eval").counts["bad"] == 0


def test_they_are_read_from_the_split_that_is_trained_on(make_config: Config, minimind: Any) -> None:
    config = make_config("builtin/dates", val_set_size=3)
    assert plan_of(config, minimind, "eval").sources[0].rows[0] == plan_of(config, minimind, "train").sources[0].rows[0]
