"""The built-in rewards: what each gives for right, wrong and odd answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.config.reward_specs import BadReward, reward_spec, reward_specs
from engine.rewards.builtin import builtin, number_of


def given(text: str, answers: list[str], **columns: object) -> list[float | None]:
    ids = [list(range(len(answer.split()))) for answer in answers]
    return builtin(reward_spec(text))(completions=answers, completion_ids=ids, **columns)


def test_exact_match_compares_with_the_row_word_for_word() -> None:
    assert given("exact_match", [" 42\n", "42.", "?"], answer=["42", "42", None]) == [1.0, 0.0, None]
    assert given("exact_match", ["a"], question=["b"]) == [None]


def test_gsm8k_compares_the_last_numbers(shared_data: Path) -> None:
    with (shared_data / "gsm8k/model_solutions_raw_100.jsonl").open() as lines:
        rows = [json.loads(line) for line in lines][:40]
    assert given("gsm8k", ["7", "none", "7"], answer=["7", "7", "many"]) == [1.0, 0.0, None]
    truths = [row["ground_truth"] for row in rows]
    assert given("gsm8k", truths, answer=truths) == [1.0] * 40
    for model in ("6b_finetuning", "175b_verification"):
        solutions = [row[model]["solution"] for row in rows]
        judged = [float(row[model]["is_correct"]) for row in rows]
        agree = sum(a == b for a, b in zip(given("gsm8k", solutions, answer=truths), judged, strict=True))
        assert agree >= 39
    assert [number_of(text) for text in ("so 1,234.50", r"\boxed{7} of 9", "#### -3", "none")] == [1234.5, 7, -3, None]


def test_patterns_forms_and_lengths() -> None:
    assert given(r"regex:^\d{4}-", ["2021-03", "on 2021-03"]) == [1.0, 0.0]
    assert given("format", ["<think>a\nb</think> c", "a <think>b</think>", "plain"]) == [1.0, 0.0, 0.0]
    assert given("format:A{}B", ["A x.* B", "A x"]) == [1.0, 0.0]
    assert given("length:4", ["a b", "a b c d", "a b c d e f", "a " * 8, "a " * 99]) == [1.0, 1.0, 0.5, 0.0, 0.0]


def test_json_that_fits_the_schema(tmp_path: Path) -> None:
    schema = tmp_path / "form.json"
    schema.write_text('{"type": "object", "required": ["day"], "properties": {"day": {"type": "integer"}}}')
    answers = ['{"day": 3}', '```json\n{"day": 3}\n```', '{"day": "3"}', "[]", "day 3", "[" * 100_000]
    assert given(f"json_schema:{schema}", answers) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    schema.write_text("{")
    with pytest.raises(ValueError, match=r"form\.json is no JSON: Expecting"):
        given(f"json_schema:{schema}", ["1"])
    schema.write_text('{"type": "thing"}')
    with pytest.raises(ValueError, match="is no JSON schema"):
        given(f"json_schema:{schema}", ["1"])


def test_answers_may_be_messages() -> None:
    answers = [[{"role": "assistant", "content": "7"}], []]
    made = builtin(reward_spec("exact_match"))(completions=answers, answer=["7", "7"])
    assert made == [1.0, 0.0]


def test_texts_are_read_with_weight_name_and_argument() -> None:
    specs = reward_specs(["0.2 * length:64", "-1*regex:a*b", "a/b.py:score", "model:org/judge", "length:9"])
    assert [spec.weight for spec in specs] == [0.2, -1.0, 1.0, 1.0, 1.0]
    assert [spec.name for spec in specs] == ["length", "regex", "score", "judge", "length_2"]
    assert (specs[1].argument, specs[2].argument, specs[2].function) == ("a*b", "a/b.py", "score")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("exact", "Did you mean exact_match"),
        ("exact_match:x", "without an argument"),
        ("regex:(", "a regular expression"),
        ("length:many", "number of tokens"),
        ("format:abc", "with {}"),
        ("mine.py:", "Name the function"),
        ("0 * gsm8k", "other than 0"),
        ("model:", "by its name"),
        ("model:builtin/tiny", "method.kind reward trains one"),
        ("json_schema", "Name it after the colon"),
    ],
)
def test_a_text_that_names_no_reward_says_what_to_do(text: str, words: str) -> None:
    with pytest.raises(BadReward) as caught:
        reward_spec(text)
    assert words in str(caught.value)
