"""What training gets: everything counted, nothing cut in silence, sources mixed and packed as asked."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.config.data import DataSource
from engine.data.plan import plan_of
from engine.data.prepare import prepare
from engine.data.pretokenized import IGNORED
from engine.data.preview import preview
from engine.errors import DataError, WorkbenchError

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


def test_kto_of_pairs_is_kto_of_the_rows_that_the_library_makes_of_them(
    shared_data: Path, make_config: Config, minimind: Any, write: Write
) -> None:
    from datasets import Dataset
    from trl.data_utils import unpair_preference_dataset

    pairs = [json.loads(line) for line in (shared_data / "gsm8k/preference_pairs.jsonl").open()][:20]
    pairs = [{name: pair[name] for name in ("prompt", "chosen", "rejected")} for pair in pairs]
    rows = list(unpair_preference_dataset(Dataset.from_list(pairs)))
    same = {**pairs[0], "rejected": pairs[0]["chosen"]}
    found = [
        prepare(make_config(write(each, name), method="kto"), minimind)
        for name, each in (("pairs.jsonl", [*pairs, same]), ("rows.jsonl", rows))
    ]
    ours, theirs = (
        sorted((row["prompt_ids"], row["completion_ids"], row["label"]) for row in each.dataset) for each in found
    )
    assert ours == theirs
    assert len(ours) == 40
    assert [row["row"] for row in found[0].dataset][:4] == [0, 0, 1, 1]
    # A pair of one answer twice would be called good and bad at once.
    (said,) = found[0].warnings
    assert said.startswith("2 of 42 rows have the same chosen and rejected answer and are left out; the first: ")
    assert said.endswith("pairs.jsonl:21")
    config = make_config(write([*pairs, same], "pairs.jsonl"), method="kto")
    shown = preview(config, minimind, {"kind": "index", "index": 0}, 1)["rows"][0]["parts"]
    assert {name: [token["id"] for token in part] for name, part in shown.items()} == {
        "prompt": found[0].dataset[0]["prompt_ids"],
        "good answer": found[0].dataset[0]["completion_ids"],
        "bad answer": found[0].dataset[1]["completion_ids"],
    }
    shown = preview(config, minimind, {"kind": "index", "index": 20}, 1)["rows"][0]
    assert shown["left_out"] == "its chosen and its rejected answer are the same"


def test_pairs_of_a_ranking_are_rows_of_their_own(write: Write, make_config: Config, minimind: Any) -> None:
    rows = [
        {"prompt": "Which is best?", "output": ["first", "second", "second", "last"]},
        {"prompt": "And?", "output": ["a", "b"]},
    ]
    path = write(rows)

    def asked(choice: str) -> Any:
        return make_config(method="dpo", source=[DataSource(path=str(path), ranking_pairs=choice)])

    found = prepare(asked("best_worst"), minimind)
    assert [row["row"] for row in found.dataset] == [0, 1]
    said = {row["row"]: minimind.decode(row["rejected_ids"]) for row in found.dataset}
    assert "last" in said[0]
    config = asked("all")
    found = prepare(config, minimind)
    assert not found.cached
    # Of the two equal answers nothing is learned.
    assert [row["row"] for row in found.dataset] == [0, 0, 0, 0, 0, 1]
    (said,) = found.warnings
    assert said == f"1 of 7 rows have the same chosen and rejected answer and are left out; the first: {path}:1"
    answers = [
        tuple(minimind.decode(row[part]).split("<")[0] for part in ("chosen_ids", "rejected_ids"))
        for row in found.dataset
    ]
    assert answers[0] == ("first", "second")
    assert answers[-2] == ("second", "last")
    shown = preview(config, minimind, {"kind": "index", "index": 0}, 1)["rows"][0]
    assert not shown.get("left_out")
    said = {name: "".join(token["text"] for token in part).split("<")[0] for name, part in shown["parts"].items()}
    second = ["rejected 3", "chosen 4", "rejected 4", "chosen 5", "rejected 5"]
    assert list(said) == ["prompt", "chosen", "rejected", *second]
    assert (said["rejected"], said["rejected 3"], said["chosen 4"]) == ("second", "last", "second")


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
    assert prepared.warnings[0].endswith(f"; the first: {path}:2")
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
        assert told in found.value.full_message


@pytest.mark.parametrize("labelled", [True, False])
def test_padding_of_rows_of_tokens_is_neither_read_nor_learned(
    write: Write, make_config: Config, gpt2: Any, labelled: bool
) -> None:
    ids = gpt2("The quick brown fox")["input_ids"]
    padded = {"input_ids": [*ids, 50256, 50256], "attention_mask": [1] * len(ids) + [0, 0]}
    padded |= {"labels": [*ids, 50256, 50256]} if labelled else {}
    config = make_config(write([padded, {"input_ids": ids}]), method="pretrain")
    for row in prepare(config, gpt2).dataset:
        assert (row["input_ids"], row["labels"]) == (ids, ids)
    for mask in ([1], [1] * len(ids) + [0, -2], "1"):
        path = write([{**padded, "attention_mask": mask}], "wrong.jsonl")
        with pytest.raises(DataError, match=f"attention_mask must hold a 0 or a 1 for each of the {len(ids) + 2}"):
            prepare(make_config(path, method="pretrain"), gpt2)
    path = write([{**padded, "attention_mask": [1] * len(ids) + [2, 2]}], "documents.jsonl")
    with pytest.raises(DataError, match="got 2, as collators that pack number the documents") as told:
        prepare(make_config(path, method="pretrain"), gpt2)
    assert "Give each document a row of its own, which data.packing packs again" in told.value.full_message


def test_rows_with_nothing_to_learn_are_never_trained(write: Write, make_config: Config, minimind: Any) -> None:
    nothing = {"messages": [{"role": "user", "content": "Hello?"}]}
    path = write([_chat("one?", "first"), nothing])
    prepared = prepare(make_config(path), minimind)
    assert len(prepared.dataset) == 1
    assert prepared.counts["masked"] == 1
    assert prepared.warnings == (f"1 of 2 rows hold nothing to learn and are left out; the first: {path}:2",)
    with pytest.raises(DataError, match="nothing is left to train on: 1 of 1 rows hold nothing to learn"):
        prepare(make_config(write([nothing], "none.jsonl")), minimind)


def test_without_thinking_answers_alone_are_learned(
    write: Write, make_config: Config, minimind: Any, gpt2: Any
) -> None:
    thought = {"role": "assistant", "content": "yes", "reasoning_content": "Let me see."}
    rows = write([{"messages": [{"role": "user", "content": "so?"}, thought]}])
    texts = write([{"prompt": "so?", "completion": " <think>Let me see.</think> yes"}], "pairs.jsonl")
    for path, tokenizer in ((rows, minimind), (texts, gpt2)):
        learned = []
        for thinking in (True, False):
            (row,) = prepare(make_config(path, trained_thinking=thinking), tokenizer).dataset
            assert "Let me see." in tokenizer.decode(row["input_ids"])
            learned.append(tokenizer.decode([each for each in row["labels"] if each >= 0]))
        assert "Let me see." in learned[0]
        assert learned[0].endswith(learned[1])
        assert learned[1].strip() == f"yes{tokenizer.eos_token}"


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
    assert any("no end token" in warning for warning in prepared.warnings)
    with pytest.raises(WorkbenchError, match=r"model.chat_template: chatlm cannot be read") as caught:
        prepare(make_config(path, model={"chat_template": "chatlm"}), copy.deepcopy(gpt2))
    assert "Did you mean chatml?" in caught.value.hint


def test_a_source_is_written_in_the_template_that_it_names(
    write: Write, make_config: Config, minimind: Any, tmp_path: Path
) -> None:
    """Each as if it were prepared alone under that template, whatever stands beside it, in language rows and in pairs."""
    from engine.config.data import DataSource

    own, before = tmp_path / "own.jinja", minimind.chat_template
    text = "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    own.write_text(text + "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}")
    talks = [write([_chat(f"one {n}?", f"first {n}")], f"talk{n}.jsonl") for n in range(3)]
    pair = {"prompt": [{"role": "user", "content": "Which?"}]}
    pair |= {side: [{"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
    pairs = [write([{**pair, "id": n}], f"pair{n}.jsonl") for n in range(3)]
    for method, files, columns in (
        ("sft", talks, ("input_ids", "labels")),
        ("dpo", pairs, ("prompt_ids", "chosen_ids", "rejected_ids")),
    ):
        named = [None, str(own), "plain"]
        sources = [DataSource(path=str(path), chat_template=name) for path, name in zip(files, named, strict=True)]
        mixed = prepare(make_config(source=sources, method=method), minimind).dataset
        alone = []
        for path, name in zip(files, named, strict=True):
            tokenizer = copy.deepcopy(minimind)
            config = make_config(path, method=method, model={"chat_template": name} if name else None)
            alone.append(prepare(config, tokenizer).dataset[0])
        assert [[row[name] for name in columns] for row in mixed] == [[row[name] for name in columns] for row in alone]
        assert len({str(row[columns[0]][:4]) for row in mixed}) == 3
        # The text of the file decides, not its name.
        own.write_text(own.read_text().replace(": ", " says: "))
        again = prepare(make_config(source=sources, method=method), minimind).dataset
        assert again[1][columns[0]] != mixed[1][columns[0]]
        assert again[0][columns[0]] == mixed[0][columns[0]]
    shown = preview(make_config(source=sources, method="dpo"), minimind, {"kind": "index", "index": 1}, 1)
    assert shown["rows"][0]["template"] == "own.jinja"
    assert minimind.chat_template == before
    lost = [DataSource(path=str(talks[0]), chat_template="chatlm")]
    with pytest.raises(WorkbenchError, match=r"chat_template of a source: chatlm cannot be read") as caught:
        prepare(make_config(source=lost), minimind)
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


def test_the_built_in_rows_prepare(make_config: Config, minimind: Any) -> None:
    dates = pytest.importorskip("engine.builtin.dates")
    from engine.config.data import DataSource

    prepared = prepare(make_config(source=[DataSource(path="builtin/dates", rows=50)]), minimind)
    expected = dates.rows("train", seed=1)[0]["messages"][-1]["content"]
    assert _trained(minimind, prepared.dataset[0]) == expected + "<|im_end|>"


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


@pytest.mark.parametrize("change", ["grows", "vanishes"])
def test_a_file_that_changes_while_it_is_read_is_named(
    tmp_path: Path, make_config: Config, minimind: Any, change: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n' * 600)

    def meddle(what: str, done: int, total: int) -> None:
        if what == "tokenizing" and change == "vanishes":
            path.unlink(missing_ok=True)
        elif what == "tokenizing":
            with path.open("a") as file:
                file.write('{"prompt": "a", "completion": "b"}\n')

    with pytest.raises(DataError, match=r"rows\.jsonl: (changed from .* bytes, while|is gone: )"):
        prepare(make_config(path), minimind, on_progress=meddle)
    path.write_text('{"prompt": "a", "completion": "b"}\n' * 600)
    assert not prepare(make_config(path), minimind).cached


def test_flags_in_completions_choose_what_is_learned_of_them(
    tmp_path: Path, make_config: Config, minimind: Any
) -> None:
    turns = [{"role": "assistant", "content": "one", "train": False}, {"role": "assistant", "content": "two"}]
    row = {"prompt": [{"role": "user", "content": "q"}], "completion": turns}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    for trained in ("assistant", "last"):
        made = prepare(make_config(tmp_path / "rows.jsonl", trained_turns=trained), minimind)
        learned = minimind.decode([label for label in made.dataset[0]["labels"] if label >= 0])
        assert "two" in learned
        assert "one" not in learned


def test_rows_after_one_whose_template_loops_are_made_and_only_it_is_left_out(
    write: Write, make_config: Config, minimind: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("engine.data.rendering.SECONDS", 0.5)
    template = tmp_path / "loops.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.content == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
        "{% endfor %}{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    minimind = copy.deepcopy(minimind)  # which takes the config's template
    rows = [_chat(f"question {n}?", "loop" if n == 300 else f"answer {n}") for n in range(600)]
    settings = {"model": {"chat_template": str(template)}, "on_bad_row": "skip"}
    prepared = prepare(make_config(write(rows), **settings), minimind)
    assert (prepared.counts["bad"], prepared.counts["kept"]) == (1, 599)
    assert "row 300" in prepared.counts["bad_row"]
    assert prepared.dataset["row"][298:302] == [298, 299, 301, 302]
    settings["on_bad_row"] = "error"
    with pytest.raises(WorkbenchError, match=r"row 300.*runs longer than"):
        prepare(make_config(write(rows), **settings), minimind)


def test_the_preview_of_a_prompt_tells_what_rewards_are_given(write: Write, make_config: Config, minimind: Any) -> None:
    path = write([{"prompt": "one?", "answer": "1", "level": 3}])
    (row,) = preview(make_config(path, method="grpo"), minimind)["rows"]
    assert row["rewards"] == {"answer": "1", "level": "3"}
    (chat,) = preview(make_config(write([_chat("one?", "1")], "chat.jsonl")), minimind)["rows"]
    assert "rewards" not in chat
