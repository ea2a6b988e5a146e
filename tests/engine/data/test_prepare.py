"""What training gets: everything counted, nothing cut in silence, cached exactly as long as nothing changed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.data.collate import IGNORED
from engine.data.plan import plan_of
from engine.data.prepare import prepare
from engine.errors import Cancelled, DataError, WorkbenchError

Write = Callable[..., Path]
Config = Callable[..., Any]


def _chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def _trained(tokenizer: Any, row: Any) -> str:
    return tokenizer.decode([label for label in row["labels"] if label != IGNORED])


def test_only_answers_are_trained_and_rows_keep_their_numbers(write: Write, make_config: Config, minimind: Any) -> None:
    path = write([_chat("one?", "first"), _chat("two?", "second")])
    prepared = prepare(make_config(path), minimind)
    assert [_trained(minimind, row) for row in prepared.dataset] == ["first<|im_end|>", "second<|im_end|>"]
    assert list(prepared.dataset["row"]) == [0, 1]
    assert prepared.facts.rows == 2
    assert prepared.facts.exact
    assert prepared.facts.trained_tokens == sum(sum(x != IGNORED for x in row["labels"]) for row in prepared.dataset)


@pytest.mark.parametrize("file", ["llama-factory/alpaca_en_demo.json", "llama-factory/alpaca_zh_demo.json"])
def test_ids_are_those_of_the_template(shared_data: Path, make_config: Config, minimind: Any, file: str) -> None:
    prepared = prepare(make_config(shared_data / file), minimind)
    rows = json.loads((shared_data / file).read_text("utf-8"))
    for index in (0, 17, 500, 998):
        row = prepared.dataset[index]
        source = rows[row["row"]]
        asked = f"{source['instruction']}\n{source['input']}" if source["input"] else source["instruction"]
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": source["output"]}]
        assert row["input_ids"] == minimind.apply_chat_template(messages, return_dict=True)["input_ids"]
        assert _trained(minimind, row) == source["output"].lstrip("\n") + "<|im_end|>"


def test_preference_rows_are_those_of_the_library(shared_data: Path, make_config: Config, minimind: Any) -> None:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    rows = [json.loads(line) for line in (shared_data / "gsm8k/preference_pairs.jsonl").open()][:40]
    messages = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "chosen": [{"role": "assistant", "content": row["chosen"]}],
            "rejected": [{"role": "assistant", "content": row["rejected"]}],
        }
        for row in rows
    ]
    arguments = DPOConfig(output_dir="unused", report_to=[], use_cpu=True, bf16=False)
    bare = object.__new__(DPOTrainer)
    bare._tokenizer = minimind
    theirs = bare._prepare_dataset(Dataset.from_list(messages), minimind, arguments, "train")
    ours = prepare(make_config(shared_data / "gsm8k/preference_pairs.jsonl", method="dpo"), minimind).dataset
    for index in range(40):
        for part in ("prompt_ids", "chosen_ids", "rejected_ids"):
            assert ours[index][part] == theirs[index][part]


@pytest.mark.parametrize("with_template", [True, False])
def test_prompt_and_completion_masks_match_the_library(
    write: Write, make_config: Config, minimind: Any, gpt2: Any, with_template: bool
) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    pairs = [{"prompt": "What is 2+2?\n", "completion": "Four."}, {"prompt": "Color: ", "completion": "blue sky"}]
    tokenizer = minimind if with_template else gpt2
    theirs_rows: Any = pairs
    if with_template:
        theirs_rows = [
            {
                "prompt": [{"role": "user", "content": pair["prompt"]}],
                "completion": [{"role": "assistant", "content": pair["completion"]}],
            }
            for pair in pairs
        ]
    arguments = SFTConfig(output_dir="unused", report_to=[], use_cpu=True, bf16=False, completion_only_loss=True)
    bare = object.__new__(SFTTrainer)
    bare._tokenizer, bare.chat_template, bare.completion_only_loss = tokenizer, None, True
    theirs = bare._prepare_dataset(Dataset.from_list(theirs_rows), tokenizer, arguments, False, None, "train")
    ours = prepare(make_config(write(pairs)), tokenizer).dataset
    for index in range(2):
        one, two = ours[index], theirs[index]
        assert one["input_ids"] == two["input_ids"]
        # The library also learns the line break that the template writes after the end mark; we do not.
        extra = [(a, b) for a, b in zip(one["labels"], two["labels"], strict=True) if a != b]
        assert all(a == IGNORED and tokenizer.decode([b]) == "\n" for a, b in extra)
        assert len(extra) == int(with_template)


LONG = "word " * 60


@pytest.mark.parametrize(
    ("settings", "lengths", "count"),
    [
        ({"excess_length": "drop"}, 1, "dropped"),
        ({"excess_length": "truncate"}, 2, "truncated"),
        ({"excess_length": "truncate", "truncation_side": "left"}, 2, "truncated"),
    ],
)
def test_rows_that_are_too_long_are_dropped_or_cut_and_counted(
    write: Write, make_config: Config, minimind: Any, settings: Any, lengths: int, count: str
) -> None:
    path = write([_chat("short?", "yes"), _chat("long?", LONG)])
    prepared = prepare(make_config(path, max_length=48, **settings), minimind)
    assert len(prepared.dataset) == lengths
    assert prepared.counts[count] == 1
    assert all(len(row["input_ids"]) <= 48 for row in prepared.dataset)
    assert prepared.facts.longest is not None
    assert prepared.facts.longest > 48
    assert "longer than data.max_length" in prepared.warnings[0]
    if settings.get("truncation_side") == "left":
        assert prepared.dataset[1]["input_ids"][-2] == minimind.convert_tokens_to_ids("<|im_end|>")


def test_by_default_a_long_row_stops_the_launch_with_its_place(
    write: Write, make_config: Config, minimind: Any
) -> None:
    path = write([_chat("short?", "yes"), _chat("long?", LONG), _chat("long too?", LONG)])
    words = r"row 1 is longer than data.max_length 48 \(2 of 3 rows are, the longest with \d+ tokens\)"
    with pytest.raises(DataError, match=r"rows\.jsonl:2: " + words) as caught:
        prepare(make_config(path, max_length=48), minimind)
    assert "data.excess_length" in caught.value.hint


def test_plain_text_is_split_without_losing_a_token(write: Write, make_config: Config, gpt2: Any) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 40
    path = write([{"text": text}])
    prepared = prepare(make_config(path, method="pretrain", max_length=32, excess_length="split"), gpt2)
    joined = [token for row in prepared.dataset for token in row["input_ids"]]
    assert joined == gpt2(text + gpt2.eos_token)["input_ids"]
    assert all(row["labels"] == row["input_ids"] for row in prepared.dataset)
    assert prepared.counts["split"] == 1


@pytest.mark.parametrize("method", ["sft", "pretrain"])
def test_rows_of_tokens_are_taken_as_they_are(write: Write, make_config: Config, gpt2: Any, method: str) -> None:
    ids, labels = gpt2("The quick brown fox")["input_ids"], [IGNORED, IGNORED]
    path = write([{"input_ids": ids, "labels": [*labels, *ids[2:]]}, {"input_ids": ids, "labels": None}])
    first, second = prepare(make_config(path, method=method), gpt2).dataset
    assert (first["input_ids"], first["labels"]) == (ids, [*labels, *ids[2:]])
    assert (second["input_ids"], second["labels"]) == (ids, ids)
    with pytest.raises(DataError, match="token 60000 is not in the vocabulary of 50,257 tokens"):
        prepare(make_config(write([{"input_ids": [1, 60000]}], "strange.jsonl"), method=method), gpt2)
    for label in (-1, 60000):  # torch would learn another token in its place, or nothing that can be told
        told = f"labels: {label} is not in the vocabulary of 50,257 tokens. Give the token that is learned, or -100"
        with pytest.raises(DataError) as found:
            prepare(make_config(write([{"input_ids": [1, 2], "labels": [IGNORED, label]}], f"{label}.jsonl")), gpt2)
        assert told in found.value.told


def test_rows_with_nothing_to_learn_are_never_trained(write: Write, make_config: Config, minimind: Any) -> None:
    nothing = {"messages": [{"role": "user", "content": "Hello?"}]}
    path = write([_chat("one?", "first"), nothing])
    prepared = prepare(make_config(path), minimind)
    assert len(prepared.dataset) == 1
    assert prepared.counts["masked"] == 1
    assert prepared.warnings == ("1 of 2 rows hold nothing to learn and are left out",)
    with pytest.raises(DataError, match="nothing is left to train on: 1 of 1 rows hold nothing to learn"):
        prepare(make_config(write([nothing], "none.jsonl")), minimind)


def test_same_chosen_and_rejected_are_counted_and_left_out(write: Write, make_config: Config, minimind: Any) -> None:
    rows = [{"prompt": "a", "chosen": "b", "rejected": "b"}, {"prompt": "a", "chosen": "b", "rejected": "c"}]
    prepared = prepare(make_config(write(rows), method="dpo"), minimind)
    assert (len(prepared.dataset), prepared.counts["identical"]) == (1, 1)


def test_a_bad_row_stops_or_is_skipped_as_asked(write: Write, make_config: Config, minimind: Any) -> None:
    rows = [_chat("one?", "first")] * 300 + [{"messages": 7}] + [_chat("two?", "second")]
    path = write(rows)
    with pytest.raises(DataError, match=r"rows\.jsonl:301: row 300: column messages must hold a list of messages"):
        prepare(make_config(path), minimind)
    prepared = prepare(make_config(path, on_bad_row="skip"), minimind)
    assert (len(prepared.dataset), prepared.counts["bad"]) == (301, 1)


def test_messages_without_a_template_say_what_to_do(write: Write, make_config: Config, gpt2: Any) -> None:
    path = write([_chat("one?", "first")])
    with pytest.raises(DataError, match="the tokenizer has no chat template") as caught:
        prepare(make_config(path), gpt2)
    assert "model.chat_template" in caught.value.hint
    for name in ("chatml", "llama3", "plain"):
        import copy

        tokenizer = copy.deepcopy(gpt2)
        prepared = prepare(make_config(path, model={"chat_template": name}), tokenizer)
        assert "first" in _trained(tokenizer, prepared.dataset[0])
        assert "one?" not in _trained(tokenizer, prepared.dataset[0])
        assert tokenizer.chat_template  # samples and the saved tokenizer speak the same


def test_a_template_file_and_an_unknown_name(write: Write, make_config: Config, gpt2: Any, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    import copy

    tokenizer = copy.deepcopy(gpt2)
    path = write([_chat("one?", "first")])
    prepared = prepare(make_config(path, model={"chat_template": str(file)}), tokenizer)
    # The token " first" begins in the header; a token is learned when any of its characters is.
    assert _trained(tokenizer, prepared.dataset[0]) == " first"
    assert any("no mark at the end" in warning for warning in prepared.warnings)
    with pytest.raises(WorkbenchError, match=r"model.chat_template: chatlm cannot be read") as caught:
        prepare(make_config(path, model={"chat_template": "chatlm"}), copy.deepcopy(gpt2))
    assert "Did you mean chatml?" in caught.value.hint


def test_the_wrong_kind_of_data_for_the_method(write: Write, make_config: Config, minimind: Any) -> None:
    pairs = write([{"prompt": "a", "chosen": "b", "rejected": "c"}], "pairs.jsonl")
    chats = write([_chat("one?", "first")])
    with pytest.raises(
        DataError, match=r"holds preference pairs \(chosen and rejected\), which method sft does not learn from"
    ):
        prepare(make_config(pairs), minimind)
    with pytest.raises(DataError, match="method dpo needs preference pairs"):
        prepare(make_config(chats, method="dpo"), minimind)


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


# -- cache -------------------------------------------------------------------------------------------------------------
def test_nothing_changed_hits_and_any_change_misses(
    write: Write, make_config: Config, minimind: Any, phi: Any, tmp_path: Path
) -> None:
    from engine.config.data import DataSource

    rows = [_chat(f"question {n}?", f"answer {n}") for n in range(8)]
    path = write(rows)
    first = prepare(make_config(path), minimind)
    assert not first.cached
    again = prepare(make_config(path), minimind)
    assert again.cached
    assert list(again.dataset) == list(first.dataset)
    os.utime(path, (1, 1))
    moved = tmp_path / "elsewhere" / "rows.jsonl"
    moved.parent.mkdir()
    shutil.copy(path, moved)
    assert prepare(make_config(path), minimind).cached
    assert prepare(make_config(moved), minimind).cached

    other = write([*rows[:-1], _chat("question 7?", "answer 8")], "other.jsonl")
    sources = [DataSource(path=str(path)), DataSource(path=str(other))]
    changed = [
        make_config(other),
        make_config(source=sources),
        make_config(source=sources[::-1]),
        make_config(source=[DataSource(path=str(path), weight=2)]),
        make_config(source=[DataSource(path=str(path), rows=4)]),
        make_config(path, max_length=1024),
        make_config(path, trained_turns="all"),
        make_config(path, packing=True),
        make_config(path, packing=True, packing_cross_doc_attn_mask=True),
        make_config(path, excess_length="drop"),
        make_config(path, model={"chat_template_kwargs": {"open_thinking": True}}),
    ]
    assert [prepare(config, minimind).cached for config in changed] == [False] * len(changed)
    assert [prepare(config, minimind).cached for config in changed] == [True] * len(changed)
    assert not prepare(make_config(path), phi).cached
    import copy

    own = copy.deepcopy(minimind)
    own.chat_template = own.chat_template.replace("im_end|>\\n", "im_end|>\\n\\n")
    assert not prepare(make_config(path), own).cached


def test_a_value_that_the_chat_template_never_names_is_refused_with_the_nearest(
    write: Write, make_config: Config
) -> None:
    path = write([_chat("question 1?", "answer 1")])
    own = SimpleNamespace(chat_template="{% if enable_thinking is defined and not enable_thinking %}-{% endif %}")
    plan = plan_of(make_config(path, model={"chat_template_kwargs": {"enable_thinking": False}}), own, "train")
    assert plan.template_kwargs == {"enable_thinking": False}
    with pytest.raises(DataError, match=r"chat_template_kwargs\.enable_thinkng: the tokenizer's") as caught:
        plan_of(make_config(path, model={"chat_template_kwargs": {"enable_thinkng": False}}), own, "train")
    assert caught.value.hint == "Did you mean enable_thinking?"


def test_a_cancelled_build_leaves_nothing_and_the_next_one_works(
    write: Write, make_config: Config, minimind: Any, tmp_path: Path
) -> None:
    path = write([_chat(f"q {n}", f"a {n}") for n in range(600)])

    def stop(what: str, done: int, total: int) -> None:
        if what == "tokenizing":
            raise Cancelled("cancelled")

    with pytest.raises(Cancelled):
        prepare(make_config(path, dataset_prepared_path=str(tmp_path / "p")), minimind, on_progress=stop)
    assert [each.name for each in (tmp_path / "p").iterdir() if each.suffix != ".lock"] == []
    assert len(prepare(make_config(path, dataset_prepared_path=str(tmp_path / "p")), minimind).dataset) == 600


def test_progress_reaches_the_end(write: Write, make_config: Config, minimind: Any) -> None:
    seen: list[tuple[str, int, int]] = []
    prepare(make_config(write([_chat("q", "a")] * 700)), minimind, on_progress=lambda *state: seen.append(state))
    assert seen[-1] == ("tokenizing", 700, 700)
    assert ("tokenizing", 256, 700) in seen


def test_a_folder_that_cannot_be_written_is_named(
    write: Write, make_config: Config, minimind: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkbenchError, match=r"data\.dataset_prepared_path: prepared data cannot be written to"):
        prepare(make_config(write([_chat("q", "a")]), dataset_prepared_path=str(tmp_path / "file" / "x")), minimind)


def test_a_full_disk_leaves_nothing_half_written(
    write: Write, make_config: Config, minimind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    from engine.data.prepare import ArrowFile

    def full(self: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ArrowFile, "_flush", full)
    with pytest.raises(WorkbenchError, match="No space left on device"):
        prepare(make_config(write([_chat("q", "a")]), dataset_prepared_path=str(tmp_path / "p")), minimind)
    assert [each.name for each in (tmp_path / "p").iterdir() if each.suffix != ".lock"] == []


# -- mixing and packing ------------------------------------------------------------------------------------------------
def test_weights_repeat_or_thin_a_source_the_same_way_each_time(
    write: Write, make_config: Config, minimind: Any
) -> None:
    from engine.config.data import DataSource

    one = write([_chat(f"a{n}", "x") for n in range(10)], "one.jsonl")
    two = write([_chat(f"b{n}", "y") for n in range(10)], "two.jsonl")
    config = make_config(source=[DataSource(path=str(one), weight=2), DataSource(path=str(two), weight=0.5)])
    rows = list(prepare(config, minimind).dataset["row"])
    assert rows[:20] == [*range(10), *range(10)]
    assert len(rows) == 25
    assert len(set(rows[20:])) == 5
    assert all(10 <= row < 20 for row in rows[20:])


def test_packs_hold_every_row_once_and_know_their_documents(
    shared_data: Path, make_config: Config, minimind: Any
) -> None:
    path = shared_data / "gsm8k/train_1000.jsonl"
    apart = prepare(make_config(path), minimind)
    packed = prepare(make_config(path, packing=True, packing_cross_doc_attn_mask=True, max_length=1024), minimind)
    assert sorted(row for pack in packed.dataset["rows"] for row in pack) == list(range(1000))
    by_row = {row["row"]: row["input_ids"] for row in apart.dataset}
    for pack in packed.dataset.select(range(20)):
        assert len(pack["input_ids"]) <= 1024
        assert pack["input_ids"] == [token for row in pack["rows"] for token in by_row[row]]
        assert pack["seq_lengths"] == [len(by_row[row]) for row in pack["rows"]]
    assert packed.facts.rows == packed.counts["packs"] == len(packed.dataset)
    assert packed.fingerprint == apart.fingerprint


def test_the_fingerprint_changes_with_the_mask_alone(write: Write, make_config: Config, minimind: Any) -> None:
    path = write([_chat("one?", "first")])
    one = prepare(make_config(path), minimind).fingerprint
    assert prepare(make_config(path, max_length=512), minimind).fingerprint == one
    assert prepare(make_config(path, trained_turns="all"), minimind).fingerprint != one


def test_the_built_in_rows_prepare(make_config: Config, minimind: Any) -> None:
    dates = pytest.importorskip("engine.builtin.dates")
    from engine.config.data import DataSource

    prepared = prepare(make_config(source=[DataSource(path="builtin/dates", rows=50)]), minimind)
    expected = dates.rows("train", seed=1)[0]["messages"][-1]["content"]
    assert _trained(minimind, prepared.dataset[0]) == expected + "<|im_end|>"


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


@pytest.mark.parametrize(
    ("method", "rows", "named"),
    [
        ("sft", [_chat("a?", "b")], True),
        ("pretrain", [{"text": "Once upon a time."}], False),
        ("embedding", [{"sentence1": "a cat", "sentence2": "a pet", "score": 4.5}], False),
    ],
)
def test_the_preview_names_a_template_only_where_one_is_used(
    method: str, rows: list[dict[str, Any]], named: bool, write: Write, make_config: Config, minimind: Any
) -> None:
    from engine.data.preview import preview

    found = preview(make_config(write(rows), method=method), minimind, {"kind": "index", "index": 0})
    assert bool(found["template"]) is named
    assert (
        any(token["text"] == "<|im_start|>" for part in found["rows"][0]["parts"].values() for token in part) is named
    )
