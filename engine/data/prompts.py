"""A row as a prompt alone: its ids as generation reads them, and what the rewards are given beside the answer.

The prompt of a conversation is all before its last assistant turns, so the rows of supervised fine-tuning serve as they
are; the answer they hold becomes the column `answer`. Other columns are handed on under their own names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engine.data.parts import IMAGE, Example, FormatError, Message

if TYPE_CHECKING:
    from engine.data.tokens import Tokens

REWARD_WORDS = frozenset({"prompt", "prompts", "completion", "completions", "completion_ids", "messages"})
"""Columns that are not handed to rewards: a reward has arguments of these names already, or they are the prompt."""


def prompt_row(tokens: Tokens, example: Example, row: Mapping[str, Any]) -> dict[str, Any]:
    """`prompt_ids`, and as JSON text the prompt itself and the columns for the rewards; for a model that sees also the
    references of the images in the prompt. Raises `FormatError`."""
    prompt, answer = prompt_and_answer(example)
    images = example.images[: _places_in(prompt)] if example.images else []
    ids, seen = tokens.prompt(prompt, example.tools, images)
    columns = {name: value for name, value in row.items() if name not in REWARD_WORDS}
    columns |= {"answer": answer} if answer is not None else {}
    return {
        "prompt_ids": ids,
        "prompt": json.dumps(tokens.turns_of(prompt, images), ensure_ascii=False),
        "columns": json.dumps(columns, ensure_ascii=False, default=str),
        **seen,
    }


def reward_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """What the rewards are told of a prepared row: its columns by name, and in `images` the path of each image's file or
    its bytes as a data URI, where it has some."""
    columns: dict[str, Any] = json.loads(row["columns"])
    return {**columns, "images": list(row["images"])} if row.get("images") else columns


def written(message: Mapping[str, Any]) -> str:
    """What a message says, with `<image>` at the place of each image."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(IMAGE if part["type"] == "image" else part["text"] for part in content)


def _places_in(prompt: str | list[Message]) -> int:
    """Places of images in a prompt; those of its answer come behind them."""
    if isinstance(prompt, str):
        return prompt.count(IMAGE)
    parts = [part for turn in prompt if isinstance(turn["content"], list) for part in turn["content"]]
    return sum(part["type"] == "image" for part in parts)


def prompt_and_answer(example: Example) -> tuple[str | list[Message], str | None]:
    """What a row asks and the answer it holds: of a conversation, all before its last assistant turns, and the last."""
    if example.kind in ("pair", "prompt"):
        given = example.chosen
        answer = given if isinstance(given, str) else written(given[-1]) if given else ""
        return example.prompt, None if example.kind == "prompt" and not answer else answer
    prompt = list(example.messages)
    answer_turn: Message | None = None
    while prompt and prompt[-1]["role"] == "assistant":
        answer_turn = answer_turn or prompt[-1]
        prompt.pop()
    if not prompt:
        raise FormatError("the conversation holds no turn to answer")
    return prompt, None if answer_turn is None else written(answer_turn)
