"""A row as a prompt alone: its ids as generation reads them, and what the rewards are given beside the answer.

The prompt of a conversation is all before its last assistant turns, so the rows of supervised fine-tuning serve as they
are; the answer they hold becomes the column `answer`. Other columns are handed on under their own names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engine.data.parts import Example, FormatError, Message

if TYPE_CHECKING:
    from engine.data.tokens import Tokens

REWARD_WORDS = frozenset({"prompt", "prompts", "completion", "completions", "completion_ids", "messages"})
"""Columns that are not handed to rewards: a reward has arguments of these names already, or they are the prompt."""


def prompt_row(tokens: Tokens, example: Example, row: Mapping[str, Any]) -> dict[str, Any]:
    """`prompt_ids`, and as JSON text the prompt itself and the columns for the rewards. Raises `FormatError`."""
    asked, answer = asked_of(example)
    columns = {name: value for name, value in row.items() if name not in REWARD_WORDS}
    columns |= {"answer": answer} if answer is not None else {}
    return {
        "prompt_ids": tokens.prompt(asked, example.tools),
        "prompt": json.dumps(tokens.turns_of(asked), ensure_ascii=False),
        "columns": json.dumps(columns, ensure_ascii=False, default=str),
    }


def asked_of(example: Example) -> tuple[str | list[Message], str | None]:
    """What a row asks and the answer it holds: of a conversation, all before its last assistant turns, and the last."""
    if example.kind in ("pair", "prompt"):
        given = example.chosen
        answer = given if isinstance(given, str) else str(given[-1]["content"]) if given else ""
        return example.prompt, None if example.kind == "prompt" and not answer else answer
    asked = list(example.messages)
    answer_turn: Message | None = None
    while asked and asked[-1]["role"] == "assistant":
        answer_turn = answer_turn or asked[-1]
        asked.pop()
    if not asked:
        raise FormatError("the conversation holds no turn to answer")
    return asked, None if answer_turn is None else str(answer_turn["content"])
