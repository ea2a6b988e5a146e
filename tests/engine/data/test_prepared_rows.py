"""Rows of the methods that do not read one text: pairs, verdicts, steps, texts to find, a teacher's table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.data.prepare import prepare
from engine.data.pretokenized import IGNORED
from engine.errors import DataError

Write = Callable[..., Path]
Config = Callable[..., Any]


def test_same_chosen_and_rejected_are_counted_and_left_out(write: Write, make_config: Config, minimind: Any) -> None:
    rows = [{"prompt": "a", "chosen": "b", "rejected": "b"}, {"prompt": "a", "chosen": "b", "rejected": "c"}]
    prepared = prepare(make_config(write(rows), method="dpo"), minimind)
    assert (len(prepared.dataset), prepared.counts["identical"]) == (1, 1)


def test_judged_rows_are_those_of_the_library(shared_data: Path, make_config: Config, minimind: Any) -> None:
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    rows = [json.loads(line) for line in (shared_data / "gsm8k/kto_rows.jsonl").open()][:24]
    messages = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "completion": [{"role": "assistant", "content": row["completion"]}],
            "label": row["label"],
        }
        for row in rows
    ]
    arguments = KTOConfig(output_dir="unused", report_to=[], use_cpu=True, bf16=False)
    bare = object.__new__(KTOTrainer)
    bare._tokenizer, bare.calculate_KL = minimind, False
    bare.desirable_weight = bare.undesirable_weight = 1.0
    theirs = bare._prepare_dataset(Dataset.from_list(messages), minimind, arguments, "eval")
    ours = prepare(make_config(shared_data / "gsm8k/kto_rows.jsonl", method="kto"), minimind).dataset
    for index in range(24):
        for part in ("prompt_ids", "completion_ids", "label"):
            assert ours[index][part] == theirs[index][part]


@pytest.mark.parametrize("label", [True, False])
def test_judged_rows_of_one_sort_are_refused(write: Write, make_config: Config, minimind: Any, label: bool) -> None:
    rows = [{"prompt": "a", "completion": "b", "label": label}] * 3
    with pytest.raises(DataError, match=f"data.train: every row is labelled {str(label).lower()}"):
        prepare(make_config(write(rows), method="kto"), minimind)


def test_a_teachers_table_is_cut_with_its_tokens_and_masks_where_it_is_empty(
    write: Write, make_config: Config, minimind: Any
) -> None:
    from engine.data.collate import collator_for
    from engine.data.preview import preview

    row = {
        "input_ids": list(range(100, 112)),
        "target_token_ids": [[], [], *([100 + place, 7] for place in range(2, 11)), [111]],
        "target_logprobs": [[], [], *([-0.1, -3.0] for _ in range(2, 11)), [-0.4]],
    }
    settings = {"method": "distill", "max_length": 8, "excess_length": "truncate", "truncation_side": "left"}
    config = make_config(write([row]), **settings)
    kept = prepare(config, minimind).dataset[0]
    assert kept["input_ids"] == list(range(104, 112))
    assert kept["teacher_tokens"][:2] == [104, 7]
    assert kept["teacher_tokens"][-2:] == [111, 0]
    whole = make_config(write([row]), method="distill")
    assert prepare(whole, minimind).facts.trained_tokens == 10
    batch = collator_for(whole, minimind)([prepare(whole, minimind).dataset[0]])
    assert batch["labels"][0].tolist() == [IGNORED, IGNORED, *range(102, 112)]
    assert batch["teacher_logps"][0, 11].tolist() == pytest.approx([-0.4, -1e9])
    shown = preview(whole, minimind)["rows"][0]["parts"]["input"]
    assert [token["trained"] for token in shown] == [False] * 2 + [True] * 10
    with pytest.raises(DataError, match="token 9999 is not in the vocabulary of 6,400 tokens"):
        prepare(make_config(write([{**row, "input_ids": [9999, *range(101, 112)]}]), method="distill"), minimind)
    for name, part, said in (
        ("before", {"input_ids": [-5, *range(101, 112)]}, "token -5 is not in the vocabulary"),
        ("other", {"labels": [-1, *range(101, 112)]}, "labels: -1 is not in the vocabulary"),
        ("nothing", {"labels": [None, *range(101, 112)]}, "column labels must hold a list of whole numbers"),
    ):
        with pytest.raises(DataError, match=said):
            prepare(make_config(write([{**row, **part}], f"{name}.jsonl"), method="distill"), minimind)


def test_texts_that_belong_together_are_whole_and_a_missing_negative_is_no_text(
    write: Write, make_config: Config, minimind: Any
) -> None:
    from engine.data.collate import collator_for
    from engine.data.preview import preview

    rows = [{"query": "2+2?", "pos": "four"}, {"query": "3+3?", "pos": "six", "neg": "a tree"}]
    config = make_config(write(rows), method="embedding")
    prepared = prepare(config, minimind)
    assert [len(row["negative_ids"]) > 0 for row in prepared.dataset] == [False, True]
    batch = collator_for(config, minimind)(list(prepared.dataset))
    texts = [
        minimind.decode(ids[mask == 1]) for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    assert texts == ["2+2?", "3+3?", "four", "six", "a tree"]
    assert batch["own_text"].tolist() == [0, 1]
    assert prepared.facts.trained_tokens == int(batch["completion_mask"].sum())
    parts = preview(config, minimind, {"kind": "index", "index": 1})["rows"][0]["parts"]
    assert list(parts) == ["anchor", "positive", "negative"]
    assert "".join(token["text"] for token in parts["negative"]) == "a tree"


def test_one_text_alone_without_a_negative_teaches_nothing(write: Write, make_config: Config, minimind: Any) -> None:
    row = {"anchor": "a", "positive": "b"}
    with pytest.raises(DataError, match="there is one row alone, and a text is only told from those of other rows"):
        prepare(make_config(write([row]), method="embedding"), minimind)
    prepare(make_config(write([{**row, "negative": "c"}]), method="embedding"), minimind)


def test_texts_with_scores_are_of_one_sort_and_a_score_is_a_number(
    write: Write, make_config: Config, minimind: Any
) -> None:
    from engine.data.collate import collator_for
    from engine.data.preview import preview

    pair = {"sentence1": "a dog runs", "sentence2": "a dog is running"}
    config = make_config(write([{**pair, "score": 4.5}, {**pair, "score": "0"}]), method="embedding")
    batch = collator_for(config, minimind)(list(prepare(config, minimind).dataset))
    assert batch["score"].tolist() == [4.5, 0.0]
    assert list(preview(config, minimind, {"kind": "index", "index": 0})["rows"][0]["parts"]) == ["text", "score 4.5"]
    mixed = [{"anchor": "a", "positive": "b", "score": 1}, {"anchor": "a", "positive": "b"}]
    with pytest.raises(DataError, match="1 rows with a score and 1 rows without a score, which are learned") as told:
        prepare(make_config(write(mixed), method="embedding"), minimind)
    assert told.value.hint == "Keep the rows of one sort."
    for bad, said in (
        ({"score": True}, "must hold a number"),
        ({"score": 1, "negative": "c"}, "has a third in negative"),
    ):
        with pytest.raises(DataError, match=said):
            prepare(make_config(write([{"anchor": "a", "positive": "b", **bad}]), method="embedding"), minimind)


@pytest.mark.parametrize(
    ("several", "named"),
    [
        ({"negative_1": "c", "negative_2": "d"}, "negative_1 and negative_2"),
        ({"hard_negatives": ["c", "d"]}, "hard_negatives"),
    ],
)
def test_negatives_that_would_not_be_read_are_told(
    write: Write, make_config: Config, minimind: Any, several: dict[str, Any], named: str
) -> None:
    from engine.config.data import DataSource

    rows = [{"anchor": word, "positive": "b", **several} for word in "xy"]
    with pytest.raises(DataError, match=f"the row holds negatives in {named}, and one column named negative is read"):
        prepare(make_config(write(rows), method="embedding"), minimind)
    if "negative_2" in several:
        chosen = DataSource(path=str(write(rows)), columns={"negative": "negative_2"})
        assert prepare(make_config(source=[chosen], method="embedding"), minimind).dataset[0]["negative_ids"]


def test_a_step_without_a_token_does_not_take_the_verdict_of_another(write: Write, make_config: Config) -> None:
    """Tokenizers of encoders drop line breaks, so that nothing is left of an empty step."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "one": 1, "two": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", pad_token="[UNK]")
    rows = [{"prompt": "one", "completions": ["two", "", "one"], "labels": [True, False, True]}]
    with pytest.raises(DataError, match="step 2 of the answer is no token of this tokenizer"):
        prepare(make_config(write(rows), method="prm"), tokenizer)


def test_a_verdict_stands_at_the_end_of_its_step(write: Write, make_config: Config, minimind: Any) -> None:
    from engine.data.collate import StepsCollator

    row = {"question": "2+2+2?", "steps": ["2+2 is 4.", "4+2 is 7."], "labels": [1, 0]}
    config = make_config(write([row]), method="prm")
    kept = prepare(config, minimind).dataset[0]
    ends = [place for place, label in enumerate(kept["labels"]) if label != IGNORED]
    assert [kept["labels"][place] for place in ends] == [1, 0]
    assert minimind.decode(kept["input_ids"][: ends[0] + 1]).endswith("\n2+2 is 4.\n")
    assert minimind.decode(kept["input_ids"][ends[0] + 1 : ends[1] + 1]) == "4+2 is 7.\n"
    assert ends[1] == len(kept["input_ids"]) - 1
    labels = StepsCollator(0, last_only=True)([kept])["labels"][0]
    assert [place for place, label in enumerate(labels.tolist()) if label != IGNORED] == ends[1:]
    with pytest.raises(DataError, match="every step is labelled true"):
        prepare(make_config(write([{**row, "labels": [1, 1]}]), method="prm"), minimind)
    with pytest.raises(DataError, match="there are 2 steps and 1 labels"):
        prepare(make_config(write([{**row, "labels": [1]}]), method="prm"), minimind)
