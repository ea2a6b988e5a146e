"""Readers of rows in which somebody judged an answer: true or false for the whole of it, or for each of its steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.data.parts import Example, FormatError, Row, kind_of, messages_of, prompt_text, text_of, tools_of
from engine.errors import visible


def is_rated(row: Row, columns: Mapping[str, str]) -> bool:
    """Whether the row looks like an answer with a verdict: a label that says true or false, and something it is about."""
    label = row.get(columns.get("label", "label"))
    answers = ("completion", "messages")
    return truth_of(label) is not None and any(row.get(columns.get(part, part)) is not None for part in answers)


def read_rated(row: Row, columns: Mapping[str, str]) -> Example:
    """A prompt with one answer and its verdict; of a conversation the last turn is the answer."""
    label = verdict(row.get(columns.get("label", "label")), f"column {visible(columns.get('label', 'label'))}")
    tools = tools_of(row, columns)
    name = columns.get("messages", "messages")
    if row.get(name) is not None:
        chat = messages_of(row[name], columns, "messages")
        if len(chat) < 2 or chat[-1]["role"] != "assistant":
            raise FormatError(f"column {visible(name)} must end with the assistant's answer that the label is about")
        return Example("rated", prompt=chat[:-1], chosen=chat[-1:], label=label, tools=tools)
    if row.get(columns.get("completion", "completion")) is None:
        raise FormatError("there is no answer: the row has neither a completion nor messages")
    prompt, answer = (row.get(columns.get(part, part)) for part in ("prompt", "completion"))
    if isinstance(prompt, (list, Mapping)) or isinstance(answer, (list, Mapping)):
        asked = _turns(prompt, columns, "prompt", "user")
        return Example(
            "rated", prompt=asked, chosen=_turns(answer, columns, "completion", "assistant"), label=label, tools=tools
        )
    texts = (prompt_text(row, columns), text_of(row, columns, "completion"))
    return Example("rated", prompt=texts[0], chosen=texts[1], label=label, tools=tools)


def verdict(value: Any, place: str) -> bool:
    """True or false, also written as 1 and 0 or as text. Raises `FormatError`."""
    truth = truth_of(value)
    if truth is None:
        raise FormatError(f"{place} must hold true or false, or 1 or 0; got {kind_of(value)}")
    return truth


_WRITTEN = {**dict.fromkeys(("true", "1", "1.0", "yes"), True), **dict.fromkeys(("false", "0", "0.0", "no"), False)}


def truth_of(value: Any) -> bool | None:
    """What a label says, in any of the ways in which files write it (CSV holds nothing but text); None for none."""
    if isinstance(value, str):
        return _WRITTEN.get(value.strip().lower())
    return bool(value) if isinstance(value, (bool, int, float)) and value in (0, 1) else None


def _turns(value: Any, columns: Mapping[str, str], part: str, role: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": value}] if isinstance(value, str) else messages_of(value, columns, part)


def read_steps(row: Row, columns: Mapping[str, str]) -> Example:
    """A prompt, the steps of an answer and a verdict for each, as many as there are steps. Raises `FormatError`."""
    prompt, steps, labels = (row.get(columns.get(part, part)) for part in ("prompt", "completions", "labels"))
    name = visible(columns.get("completions", "completions"))
    if not isinstance(steps, list) or not steps or not all(isinstance(step, str) for step in steps):
        raise FormatError(f"column {name} must hold a list of texts, one a step; got {kind_of(steps)}")
    if not isinstance(labels, list) or len(labels) != len(steps):
        count = len(labels) if isinstance(labels, list) else 0
        raise FormatError(f"there are {len(steps)} steps and {count} labels; they must be as many")
    verdicts = [verdict(value, f"label {place}") for place, value in enumerate(labels)]
    asked = prompt if isinstance(prompt, str) else messages_of(prompt, columns, "prompt")
    return Example("steps", prompt=asked, steps=steps, verdicts=verdicts, tools=tools_of(row, columns))
