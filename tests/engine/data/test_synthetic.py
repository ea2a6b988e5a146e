"""Synthetic rows: as many, as long and as alike as they are asked for, in every method that learns from them."""

from __future__ import annotations

import json
from itertools import islice

import pytest

from engine.builtin import GENERATED
from engine.builtin.synthetic import SyntheticRows
from engine.config.kinds import SYNTHETIC
from engine.data.cache import key_of
from engine.data.plan import plan_of
from engine.data.prepare import prepare
from engine.data.streaming.stream import open_stream
from engine.errors import DataError
from engine.rules import read


def config_of(method="sft", data=None, seed=42, **source):
    found = read(
        {
            "version": 1,
            "model": {"name": "builtin/tiny"},
            "method": {"kind": method},
            "data": {"train": [{"format": "synthetic", **source}], "max_length": 256, **(data or {})},
            "run": {"seed": seed},
        }
    )
    assert not [each for each in found.findings if each.severity == "error"], found.findings
    return found.config


def ids(prepared):
    return [list(row) for row in prepared.dataset["input_ids"]]


def test_rows_have_the_size_that_is_asked_for_and_hold_no_special_token(minimind):
    prepared = prepare(config_of(rows=30, tokens=100), minimind)
    found = ids(prepared)
    assert [len(row) for row in found] == [100] * 30
    assert len({tuple(row) for row in found}) == 30
    assert prepared.facts.tokens == 3000
    special = {*minimind.all_special_ids, *minimind.added_tokens_decoder}
    assert not special & {token for row in found for token in row}
    assert len({token for row in found for token in row}) > 2000, "the whole vocabulary is drawn from"
    assert [list(row) for row in prepared.dataset["labels"]] == found


def test_one_seed_draws_one_set_and_another_seed_another(minimind, tmp_path):
    first, again, other = (
        prepare(
            config_of(rows=8, tokens=40, min_tokens=20, seed=seed, data={"dataset_prepared_path": str(tmp_path / at)}),
            minimind,
        )
        for seed, at in ((1, "a"), (1, "b"), (2, "a"))
    )
    assert sorted(ids(first)) == sorted(ids(again))
    assert not {tuple(row) for row in ids(first)} & {tuple(row) for row in ids(other)}
    lengths = {len(row) for row in ids(prepare(config_of(rows=300, tokens=40, min_tokens=20), minimind))}
    assert lengths == set(range(20, 41))


def test_what_a_row_holds_is_the_same_on_every_machine():
    rows = GENERATED[SYNTHETIC].of({"rows": 3, "tokens": 64, "min_tokens": 8}, "train", 7)
    assert [(row["tokens"], row["seed"]) for row in rows] == KNOWN


KNOWN = [(56, 31294530640255), (25, 152359129486794), (30, 256436730685130)]


@pytest.mark.parametrize("method", ["pretrain", "dpo", "kto", "reward", "orpo"])
def test_methods_that_learn_from_answers_get_pairs_of_that_length(method, minimind):
    prepared = prepare(config_of(method, rows=6, tokens=50), minimind)
    row = prepared.dataset[0]
    if method == "pretrain":
        assert len(row["input_ids"]) == 50
        return
    answers = ["completion_ids"] if method == "kto" else ["chosen_ids", "rejected_ids"]
    assert {len(row["prompt_ids"]) + len(row[part]) for part in answers} == {50}
    assert len(row["prompt_ids"]) == 25
    assert method == "kto" or row["chosen_ids"] != row["rejected_ids"]
    if method == "kto":
        assert sorted(prepared.dataset["label"]) == [False] * 3 + [True] * 3


def test_a_million_rows_are_told_apart_by_their_size_without_being_made(minimind, monkeypatch):
    made, plain = [], SyntheticRows.__getitem__
    monkeypatch.setattr(SyntheticRows, "__getitem__", lambda rows, index: made.append(index) or plain(rows, index))
    keys = {
        key_of(plan_of(config_of(rows=rows, tokens=tokens), minimind, "train"), minimind, lambda *told: None)
        for rows, tokens in ((1_000_000, 65), (1_000_001, 65), (1_000_000, 64))
    }
    assert len(keys) == 3
    assert len(made) < 3000


def test_rows_are_packed_like_others(minimind):
    packed = prepare(config_of(rows=20, tokens=100, min_tokens=30, data={"packing": True}), minimind)
    assert packed.facts.tokens == sum(
        len(row) for row in ids(prepare(config_of(rows=20, tokens=100, min_tokens=30), minimind))
    )


def test_methods_that_need_words_refuse_them(minimind):
    found = read(
        {
            "version": 1,
            "model": {"name": "builtin/tiny"},
            "method": {"kind": "grpo", "reward_funcs": ["exact_match"]},
            "data": {"train": [{"format": "synthetic"}]},
        }
    )
    assert any(each.path == "data.train.0.format" and each.severity == "error" for each in found.findings), (
        found.findings
    )
    with pytest.raises(DataError, match="prompts"):
        prepare(found.config, minimind)


def test_no_file_is_taken_for_synthetic_rows(write, make_config, minimind):
    path = write([{"tokens": 5, "seed": 1}])
    with pytest.raises(DataError, match="fit no known format"):
        prepare(make_config(path), minimind)
    assert json.loads(path.read_text())["tokens"] == 5


def test_streamed_shards_are_those_of_the_size_and_the_seed_that_are_asked_for(minimind):
    """Both are generated, so neither a file's date nor its bytes tell one set from another."""

    def first(seed=42, **source):
        config = config_of(seed=seed, data={"streaming": True, "shuffle": False}, rows=20, **source)
        config = config.model_copy(update={"optim": config.optim.model_copy(update={"max_steps": 2})})
        prepared = open_stream(config, minimind)
        try:
            return [list(row["input_ids"]) for row in islice(prepared.stream, 16)]
        finally:
            prepared.stream.close()

    assert {len(row) for row in first(tokens=60)} == {60}
    assert {len(row) for row in first(tokens=30)} == {30}
    assert sorted(first(tokens=30)) != sorted(first(seed=1, tokens=30))
    dates = {"path": "builtin/dates", "format": "messages"}
    assert sorted(first(**dates)) != sorted(first(seed=1, **dates))
