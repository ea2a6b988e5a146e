"""The built-in rewards: plain functions of answers and the row's columns, one number each between 0 and 1.

They have the signature of a person's own reward function, `f(completions, completion_ids, **columns) -> list[float]`, and
run in the same process as these. A completion is a text, or a list of messages whose last one is the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine.config.reward_specs import RewardSpec, pattern_of

Reward = Callable[..., list[float | None]]
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")


def answer_text(completion: Any) -> str:
    """The text of a completion: itself, or what its last message says."""
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content") if completion else ""
    return content if isinstance(content, str) else ""


def builtin(spec: RewardSpec) -> Reward:
    """The function of a built-in reward. Raises ValueError or OSError for an argument that cannot be used."""
    return _MAKERS[spec.kind](spec.argument)


def _exact_match(_: str) -> Reward:
    def exact_match(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        answers = _answers(columns, len(completions))
        return [
            None if wanted is None else float(answer_text(given).strip() == str(wanted).strip())
            for given, wanted in zip(completions, answers, strict=True)
        ]

    return exact_match


def _gsm8k(_: str) -> Reward:
    def gsm8k(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        rights = (None if each is None else number_of(str(each)) for each in _answers(columns, len(completions)))
        return [
            None if right is None else float(number_of(answer_text(given)) == right)
            for given, right in zip(completions, rights, strict=True)
        ]

    return gsm8k


def number_of(text: str) -> float | None:
    """The number that an answer comes to: after `####` or in `\\boxed{}` where there is one, else the last of the text."""
    tail = text.rpartition("####")[2] if "####" in text else text
    boxed = re.findall(r"\\boxed\{([^{}]*)\}", tail)
    numbers = _NUMBER.findall(boxed[-1] if boxed else tail)
    try:
        return float(numbers[-1].replace(",", "")) if numbers else None
    except ValueError:
        return None


def _regex(pattern: str) -> Reward:
    compiled = re.compile(pattern)

    def regex(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return [float(compiled.search(answer_text(completion)) is not None) for completion in completions]

    return regex


def _format(form: str) -> Reward:
    compiled = re.compile(pattern_of(form))

    def format(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return [float(compiled.fullmatch(answer_text(completion)) is not None) for completion in completions]

    return format


def _length(limit: str) -> Reward:
    most = int(limit)

    def length(completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float | None]:
        return [min(1.0, max(0.0, 2.0 - len(ids) / most)) for ids in completion_ids]

    return length


def _json_schema(path: str) -> Reward:
    import jsonschema

    try:
        schema = json.loads(Path(path).read_text("utf-8"))
    except ValueError as problem:
        raise ValueError(f"{path} is no JSON: {problem}") from None
    kind = jsonschema.validators.validator_for(schema)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as problem:
        raise ValueError(f"{path} is no JSON schema: {problem.message}") from None
    checker = kind(schema)

    def json_schema(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return [float(_fits(checker, answer_text(completion))) for completion in completions]

    return json_schema


def _fits(checker: Any, text: str) -> bool:
    text = text.strip()
    if text.startswith("```") and text.endswith("```"):
        text = text.strip("`").removeprefix("json").strip()
    try:
        return bool(checker.is_valid(json.loads(text)))
    except (ValueError, RecursionError):
        return False


def _answers(columns: dict[str, Any], count: int) -> Sequence[Any]:
    """The rows' own answers, None for a row that has none: what compares with them does not apply to it."""
    return columns.get("answer") or [None] * count


_MAKERS: dict[str, Callable[[str], Reward]] = {
    "exact_match": _exact_match,
    "gsm8k": _gsm8k,
    "regex": _regex,
    "format": _format,
    "length": _length,
    "json_schema": _json_schema,
}
