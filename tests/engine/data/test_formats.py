"""Formats are detected, said, and can be overridden; what cannot be read names the column and the row."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.config.kinds import example_row
from engine.config.method import METHODS
from engine.data.detect import detect
from engine.data.formats import read_example, transcript
from engine.data.parts import FormatError, columns_of
from engine.data.prepared_rows import SHAPES
from engine.data.rows import open_rows

Write = Callable[..., Path]

DETECTED = [
    ("gsm8k/kto_rows.jsonl", "unpaired_preference", "an answer with a verdict"),
    ("llama-factory/kto_en_demo.json", "unpaired_preference", "an answer with a verdict"),
    ("llama-factory/alpaca_en_demo.json", "alpaca", "columns instruction, output, input: Alpaca"),
    ("llama-factory/c4_demo.jsonl", "text", "columns text: plain text"),
    ("llama-factory/wiki_demo.txt", "text", "columns text: plain text; a row is a line"),
    ("tinyshakespeare/input_first_900k.txt", "text", "columns text: plain text; a row is a paragraph"),
    ("gsm8k/train_1000.jsonl", "prompt_completion", "question is the prompt, answer is the completion"),
    ("gsm8k/preference_pairs.jsonl", "preference", "columns chosen, rejected, prompt: a preference pair"),
    ("llama-factory/dpo_en_demo.json", "preference", "conversations is the prompt"),
    ("hh-rlhf/harmless_base_test_tame_110.jsonl", "preference", "columns chosen, rejected: a preference pair"),
    ("stack-exchange/stack_exchange_paired_tiny.json", "preference", "response_j is the chosen"),
    ("llama-factory/v1_dpo_demo.jsonl", "preference", "chosen_messages is the chosen"),
    ("llama-factory/glaive_toolcall_en_demo.json", "sharegpt", "columns conversations, tools: ShareGPT"),
    ("llama-factory/reason_tool_use_demo_50.jsonl", "messages", "columns messages, tools: messages (OpenAI)"),
]


@pytest.mark.parametrize(("file", "format", "why"), DETECTED)
def test_real_files_are_detected_and_every_row_reads(shared_data: Path, file: str, format: str, why: str) -> None:
    rows = open_rows(shared_data / file)
    found = detect(rows)
    assert (found.format, found.problems) == (format, ())
    assert why in found.why
    assert all(read_example(row, format, found.columns).kind for row in rows)


def test_judged_answers_are_told_from_training_rows(shared_data: Path) -> None:
    found = detect(open_rows(shared_data / "gsm8k/kto_rows.jsonl"))
    assert (found.format, found.problems) == ("unpaired_preference", ())
    example = read_example(open_rows(shared_data / "gsm8k/kto_rows.jsonl")[0], "unpaired_preference", found.columns)
    assert isinstance(example.label, bool)
    named = detect(open_rows(shared_data / "gsm8k/kto_rows.jsonl"), format="prompt_completion")
    assert (named.format, named.problems) == ("prompt_completion", ())


def test_the_last_turn_of_a_judged_conversation_is_the_answer() -> None:
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "5"}]
    example = read_example({"messages": turns, "label": 0}, "unpaired_preference", {})
    assert (example.prompt, example.chosen, example.label) == (turns[:1], turns[1:], False)
    with pytest.raises(FormatError, match="must end with the assistant's answer"):
        read_example({"messages": turns[:1], "label": True}, "unpaired_preference", {})
    with pytest.raises(FormatError, match=r"column label must hold true or false, or 1 or 0; got text \(good\)"):
        read_example({"prompt": "a", "completion": "b", "label": "good"}, "unpaired_preference", {})
    with pytest.raises(FormatError, match="neither a completion nor messages"):
        read_example({"prompt": "a", "label": True}, "unpaired_preference", {})


def test_columns_that_fit_nothing_are_listed_with_the_way_out(write: Write) -> None:
    found = detect(open_rows(write([{"sentence1": "a dog runs", "sentence2": "a dog sleeps", "label": 2}])))
    assert found.format is None
    assert "columns sentence1, sentence2, label fit no known format" in found.problems[0]


def test_two_sentences_with_a_score_are_texts_to_embed(shared_data: Path) -> None:
    rows = open_rows(shared_data / "stsb/stsb_en_images_dev_250.jsonl")
    found = detect(rows)
    assert (found.format, found.problems) == ("embedding", ())
    assert read_example(rows[0], "embedding", found.columns).score == rows[0]["score"]


def test_a_column_map_makes_any_column_a_part(write: Write) -> None:
    rows = open_rows(write([{"frage": "2+2?", "antwort": "4"}]))
    found = detect(rows, {"prompt": "frage", "completion": "antwort"})
    assert found.format == "prompt_completion"
    example = read_example(rows[0], "prompt_completion", found.columns)
    assert (example.prompt, example.chosen) == ("2+2?", "4")


def test_message_properties_can_be_mapped(write: Write) -> None:
    row = {"messages": [{"speaker": "human", "words": "Hi"}, {"speaker": "bot", "words": "Yo", "inner": "hm"}]}
    rows = open_rows(write([row]))
    found = detect(rows, {"role": "speaker", "content": "words", "thinking": "inner"}, "messages")
    assert found.problems == ()
    assert read_example(rows[0], "messages", found.columns).messages == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yo", "reasoning_content": "hm"},
    ]


def test_a_file_that_mixes_formats_names_the_row_where_it_changes(write: Write) -> None:
    rows = [{"instruction": "a", "output": "b"}] * 3 + [{"text": "other"}]
    found = detect(open_rows(write(rows)))
    assert found.format == "alpaca"
    assert len(found.problems) == 1
    assert found.problems[0].endswith("rows.jsonl:4: this row is plain text, the rows before are Alpaca; row 3")


@pytest.mark.parametrize(
    ("row", "format", "sentence"),
    [
        ({"instruction": "a"}, "alpaca", "column output .output of Alpaca. is missing; the row has instruction"),
        ({"instruction": "a", "output": None}, "alpaca", "column output .* is empty"),
        ({"instruction": "a", "output": ["x"]}, "alpaca", "column output must hold text; got a list"),
        ({"text": {"a": 1}}, "text", "column text must hold text; got an object"),
        ({"messages": "no json"}, "messages", "column messages must hold JSON"),
        (
            {"messages": [{"role": "wizard", "content": "x"}]},
            "messages",
            "message 1 of column messages has the role wizard",
        ),
        ({"messages": [{"role": "user"}]}, "messages", "message 1 of column messages has no content"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages", "message 1 .* must hold text; got"),
        ({"messages": ["hello"]}, "messages", "message 1 .* must be an object with a role"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages", "part of type audio"),
        ({"chosen": "a", "rejected": "b"}, "preference", "there is no prompt, and chosen is no transcript"),
        ({"chosen": "a", "rejected": [{"role": "user", "content": "x"}]}, "preference", "must both hold"),
        (
            {"prompt": "q", "chosen": "a", "rejected": 7},
            "preference",
            "rejected must hold text or a list of messages; got int",
        ),
        ({"input_ids": [1, "2"]}, "tokens", "input_ids must hold a list of whole numbers"),
        ({"input_ids": [1, 2], "labels": [1]}, "tokens", "labels hold 1 numbers and input_ids 2"),
        (
            {"input_ids": [1], "target_token_ids": [[1], [2]], "target_logprobs": [[-1.0]]},
            "distill",
            "target_token_ids holds 2 lists and input_ids 1",
        ),
        (
            {"input_ids": [1], "target_token_ids": [[1, 2]], "target_logprobs": [[-1.0]]},
            "distill",
            "token 0: 2 target tokens and 1 log-prob",
        ),
        (
            {"input_ids": [1], "target_token_ids": [[1]], "target_logprobs": [[0.7]]},
            "distill",
            "must hold logarithms of probabilities, at most 0; got 0.7",
        ),
        (
            {"input_ids": [1, 2], "target_token_ids": [[], [1, 2, 1]], "target_logprobs": [[], [-2.0, -2.0, -3.0]]},
            "distill",
            "token 1: target_token_ids must name each token once; got 1 again",
        ),
        (
            {"input_ids": [1], "target_token_ids": [[1, 2]], "target_logprobs": [[-0.1, -0.1]]},
            "distill",
            "add up to at most 1; got 1.81",
        ),
        ({"messages": [], "audios": ["a.wav"]}, "messages", "column audios holds media"),
        ({"x": 1}, "poetry", "unknown format poetry; known are"),
    ],
)
def test_a_row_that_does_not_fit_says_why(row: Any, format: str, sentence: str) -> None:
    with pytest.raises(FormatError, match=sentence):
        read_example(row, format, {})


def test_transcripts_become_turns_with_their_shared_beginning_as_prompt() -> None:
    chosen = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Joke?\n\nAssistant: No."
    rejected = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Joke?\n\nAssistant: Knock knock."
    example = read_example({"chosen": chosen, "rejected": rejected}, "preference", {})
    assert [turn["role"] for turn in example.prompt] == ["user", "assistant", "user"]
    assert example.chosen == [{"role": "assistant", "content": "No."}]
    assert example.rejected == [{"role": "assistant", "content": "Knock knock."}]
    assert transcript("Human: no paragraph before") is None


def test_tool_calls_and_reasoning_of_typed_parts(shared_data: Path) -> None:
    rows = open_rows(shared_data / "llama-factory/reason_tool_use_demo_50.jsonl")
    examples = [read_example(row, "messages", {}) for row in rows]
    turns = [turn for example in examples for turn in example.messages]
    calls = [call for turn in turns for call in turn.get("tool_calls", [])]
    assert calls
    assert all(isinstance(call["function"]["arguments"], dict) for call in calls)
    assert any(turn.get("reasoning_content") for turn in turns)
    assert all(isinstance(turn["content"], str) for turn in turns)


def test_function_calls_of_sharegpt_become_tool_calls(shared_data: Path) -> None:
    rows = open_rows(shared_data / "llama-factory/glaive_toolcall_en_demo.json")
    called = [turn for row in rows for turn in read_example(row, "sharegpt", {}).messages if turn.get("tool_calls")]
    assert len(called) > 50
    assert all(turn["role"] == "assistant" and turn["content"] == "" for turn in called)


def test_alpaca_joins_instruction_and_input_and_keeps_the_history() -> None:
    row = {"instruction": "Add", "input": "2+2", "output": "4", "history": [["Hi", "Hello"]], "system": "Be brief"}
    example = read_example(row, "alpaca", {})
    assert [turn["content"] for turn in example.messages] == ["Be brief", "Hi", "Hello", "Add\n2+2", "4"]


@pytest.mark.parametrize("kind", list(METHODS))
def test_the_row_that_is_shown_for_a_method_is_one_that_it_learns_from(kind: str, tmp_path: Path) -> None:
    row = example_row(METHODS[kind])
    assert row, f"no format of {kind} has an example in engine.config.kinds.EXAMPLES"
    (tmp_path / "rows.jsonl").write_text(f"{row}\n{row}\n")
    found = detect(open_rows(tmp_path / "rows.jsonl"))
    assert found.format in METHODS[kind].formats
    assert not found.problems


def _rows(place: Path, *rows: dict[str, object]) -> Path:
    place.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def test_a_ranking_is_its_best_answer_against_its_worst(tmp_path: Path) -> None:
    row = {"instruction": "Add", "input": "2+2", "output": ["4", "four", "5"]}
    found = detect(open_rows(_rows(tmp_path / "r.jsonl", row)))
    assert (found.format, found.problems) == ("ranking", ())
    pair = read_example(row, "ranking", found.columns)
    assert (pair.prompt, pair.chosen, pair.rejected) == ("Add\n2+2", "4", "5")


@pytest.mark.parametrize(
    ("choice", "pairs"),
    [
        ("best_worst", "ad"),
        ("best_rest", "ab ac ad"),
        ("adjacent", "ab bc cd"),
        ("all", "ab ac ad bc bd cd"),
    ],
)
@pytest.mark.parametrize("told", [False, True], ids=["texts", "messages"])
def test_a_ranking_gives_the_pairs_that_its_source_asks_for(choice: str, pairs: str, told: bool) -> None:
    answers = [[{"role": "assistant", "content": each}] for each in "abcd"] if told else [*"abcd"]
    example = read_example({"prompt": "Which?", "output": answers}, "ranking", {})
    example.ranking_pairs = choice
    made = SHAPES["pairs"].examples(example)
    said = [
        "".join(each if isinstance(each, str) else each[0]["content"] for each in (one.chosen, one.rejected))
        for one in made
    ]
    assert " ".join(said) == pairs
    # A verdict for each answer is made of the two that differ most, whatever pairs are asked for.
    assert [each.label for each in SHAPES["rated"].examples(example)] == [True, False]


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "Add", "input": "2+2", "chosen": "4", "rejected": "5"},
        {"instruction": "Add", "input": "2+2", "output": "4", "label": 1},
        {"instruction": "Add", "input": "2+2", "answer": "4"},
    ],
)
def test_what_stands_beside_an_instruction_belongs_to_the_prompt(tmp_path: Path, row: dict[str, object]) -> None:
    found = detect(open_rows(_rows(tmp_path / "r.jsonl", row)))
    if found.format == "prompt_completion":
        found = detect(open_rows(tmp_path / "r.jsonl"), format="prompts")
    assert read_example(row, found.format or "", found.columns).prompt == "Add\n2+2"


def test_names_of_roles_are_told_with_the_way_to_map_them_and_mapped(tmp_path: Path) -> None:
    turns = [{"speaker": "Customer", "text": "Hi"}, {"speaker": "Agent", "text": "Hello"}]
    path = _rows(tmp_path / "r.jsonl", {"messages": turns})
    keys = {"role": "speaker", "content": "text"}
    (problem,) = detect(open_rows(path), columns_of({}, keys, {})).problems
    assert problem.endswith("Say what it means under the source's roles, as Customer: user.")
    columns = columns_of({}, keys, {"Customer": "user", "Agent": "assistant"})
    found = detect(open_rows(path), columns)
    assert not found.problems
    assert [turn["role"] for turn in read_example({"messages": turns}, "messages", columns).messages] == [
        "user",
        "assistant",
    ]


def test_one_bad_row_at_the_start_hides_neither_the_format_nor_the_others(tmp_path: Path) -> None:
    good = {"messages": [{"role": "user", "content": "a"}]}
    found = detect(open_rows(_rows(tmp_path / "r.jsonl", {"other": 1}, *[good] * 8)))
    assert (found.format, found.bad, found.looked) == ("messages", 1, 9)


def test_channels_of_harmony_become_thinking_calls_and_answers() -> None:
    turns = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "channel": "analysis", "content": [{"type": "text", "text": "I look it up."}]},
        {"role": "assistant", "channel": "commentary", "recipient": "functions.weather", "content": '{"at": "Kiel"}'},
        {"role": "tool", "name": "functions.weather", "content": "rain"},
        {"role": "assistant", "channel": "analysis", "content": "So it rains."},
        {"role": "assistant", "channel": "final", "content": "Rain."},
    ]
    found = read_example({"messages": turns}, "messages", {}).messages
    assert [turn["role"] for turn in found] == ["user", "assistant", "tool", "assistant"]
    assert found[1]["reasoning_content"] == "I look it up."
    assert found[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"at": "Kiel"}}
    assert (found[3]["content"], found[3]["reasoning_content"]) == ("Rain.", "So it rains.")
    assert not any("channel" in turn or "recipient" in turn for turn in found)


def test_what_is_written_to_all_is_no_call_of_a_tool() -> None:
    answer = {"role": "assistant", "channel": "final", "recipient": "all", "content": "Rain."}
    (found,) = read_example({"messages": [answer]}, "messages", {}).messages
    assert found == {"role": "assistant", "content": "Rain."}
    (found,) = read_example({"messages": [{**answer, "channel": ""}]}, "messages", {}).messages
    assert found == {"role": "assistant", "content": "Rain."}


def test_channels_that_cannot_be_joined_say_why() -> None:
    thought = {"role": "assistant", "channel": "analysis", "content": "hm"}
    answer = {"role": "assistant", "channel": "final", "content": "yes", "train": False}
    with pytest.raises(FormatError, match="message 2 of column messages is flagged otherwise than the thinking"):
        read_example({"messages": [thought, answer]}, "messages", {})
    with pytest.raises(FormatError, match="is in the channel aside; known are analysis, commentary, final"):
        read_example({"messages": [{**thought, "channel": "aside"}]}, "messages", {})
    alone = read_example({"messages": [thought, {"role": "user", "content": "and?"}]}, "messages", {}).messages
    assert alone[0] == {"role": "assistant", "content": "", "reasoning_content": "hm"}


def test_calls_and_tools_as_openai_first_wrote_them() -> None:
    turns = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": '{"at": "Kiel"}'}},
        {"role": "function", "name": "weather", "content": "rain"},
        {"role": "assistant", "content": "Rain."},
    ]
    row = {"messages": turns, "functions": [{"name": "weather", "parameters": {"type": "object", "properties": {}}}]}
    found = read_example(row, "messages", {})
    assert found.messages[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"at": "Kiel"}}
    assert [turn["role"] for turn in found.messages] == ["user", "assistant", "tool", "assistant"]
    assert [tool["function"]["name"] for tool in found.tools or ()] == ["weather"]
    assert all(tool["type"] == "function" for tool in found.tools or ())


def test_preferences_as_openai_writes_them(write: Callable[..., Path]) -> None:
    tool = {"type": "function", "function": {"name": "look"}}
    row = {
        "input": {"messages": [{"role": "user", "content": "one?"}], "tools": [tool]},
        "preferred_output": [{"role": "assistant", "content": "good"}],
        "non_preferred_output": [{"role": "assistant", "content": "bad"}],
    }
    seen = detect(open_rows(write([row])))
    assert (seen.format, seen.problems) == ("preference", ())
    found = read_example(row, "preference", seen.columns)
    assert isinstance(found.prompt, list)
    assert [turn["content"] for turn in (*found.prompt, *found.chosen, *found.rejected)] == ["one?", "good", "bad"]
    assert found.tools == [tool]


@pytest.mark.parametrize("missing", [None, ...])
def test_a_first_row_without_its_answer_does_not_make_the_source_one_of_prompts(write: Write, missing: object) -> None:
    first = {"prompt": "1 + 1?", **({"completion": None} if missing is None else {})}
    rows = [first, *({"prompt": f"{n} + 1?", "completion": str(n + 1)} for n in range(1, 4))]
    found = detect(open_rows(write(rows)))
    if missing is None:
        assert (found.format, found.bad, len(found.problems)) == ("prompt_completion", 1, 1)
        assert "completion" in found.problems[0]
        assert "rows after are" in found.problems[0], "none are before it"
    else:
        assert found.format == "prompts", "rows of other columns are another source's"


def test_one_row_with_an_answer_does_not_make_a_source_of_prompts_another(write: Write) -> None:
    asked = [{"prompt": f"{n} + 1?", "completion": None} for n in range(8)]
    answered = {"prompt": "1 + 1?", "completion": "2"}
    found = detect(open_rows(write([*asked[:5], answered, *asked[5:]])))
    assert found.format == "prompts"
    assert found.bad <= 1
