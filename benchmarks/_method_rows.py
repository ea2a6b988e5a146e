"""Rows of every method for benchmarks: each sequence of the full length, tokens as frequent as in text, no data read.

ORPO's prompts are one token long: TRL's trainer trains the prompt too, and so both train the same tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _rewards import even, third
from datasets import Dataset

from engine.builtin import dates
from engine.config.method import METHODS

GENERATES = "grpo", "gdpo", "ppo"
COUNT, TOP_K = 64, 8
# fmt: off
LENGTHS = {
    "alpaca": (
        20, 26, 29, 32, 33, 36, 38, 39, 40, 43, 44, 45, 48, 50, 53, 55, 57, 60, 63, 66, 71, 77, 83, 90, 97, 103, 109, 114, 122,
        130, 138, 146, 155, 161, 169, 176, 184, 195, 202, 211, 223, 234, 244, 255, 274, 284, 297, 306, 316, 328, 341, 354, 366,
        377, 393, 406, 418, 431, 446, 465, 483, 515, 572, 751,
    ),
    "gsm8k": (
        78, 94, 104, 110, 113, 117, 120, 125, 128, 130, 133, 135, 138, 140, 143, 146, 149, 151, 154, 156, 158, 161, 163, 165,
        168, 170, 172, 174, 176, 179, 182, 185, 187, 189, 192, 195, 199, 201, 204, 208, 211, 215, 221, 224, 227, 231, 236, 240,
        244, 249, 253, 260, 269, 275, 282, 289, 295, 305, 319, 333, 350, 366, 398, 517,
    ),
}
# fmt: on
"""Tokens of conversations of real sets, from the shortest to the longest in 64 equal steps of their order: 999 of Alpaca's and
1,000 of GSM8K's, with the tokenizer and chat template of Phi-3 mini."""
REWARDS: dict[str, list[Callable[..., list[float]]]] = {"grpo": [even], "gdpo": [even, third], "ppo": [even]}


def rows_a_step(method: str, sequences: int) -> int:
    """Rows that make so many sequences: a pair is two; a method that generates takes 4 answers for each."""
    if method in GENERATES:
        return 4 * sequences
    return sequences // 2 if METHODS[method].rows in ("pairs", "texts") else sequences


def method_rows(
    method: str,
    tokens: int,
    vocabulary: int,
    tokenizer: Any,
    *,
    ragged: bool = False,
    count: int = COUNT,
    lengths_of: str = "",
) -> Dataset:
    """Prepared rows of the shape that the method learns from; `ragged` ones have a quarter of the tokens up to all, or the
    lengths of a set of `LENGTHS`, up to those tokens."""
    if method in GENERATES:
        asked = [each["messages"][:1] for each in dates.rows(count=count)]
        return Dataset.from_list([_prompt(row, each, tokenizer) for row, each in enumerate(asked)])
    draw = _Draw(vocabulary)
    lengths = draw.lengths(tokens, count) if ragged else [tokens] * count
    if lengths_of:
        lengths = [min(tokens, each) for each in LENGTHS[lengths_of]]
    return Dataset.from_list([{**_row(method, row, length, draw), "row": row} for row, length in enumerate(lengths)])


class _Draw:
    """Token ids, some of them far more frequent than others."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary, self.generator = vocabulary, torch.Generator().manual_seed(0)

    def ids(self, length: int) -> list[int]:
        uniform = torch.rand(length, generator=self.generator)
        ids: list[int] = (self.vocabulary**uniform).long().clamp(max=self.vocabulary - 1).tolist()
        return ids

    def lengths(self, tokens: int, count: int) -> list[int]:
        """As many tokens for each row, even numbers."""
        share = 0.25 + 0.75 * torch.rand(count, generator=self.generator)
        return [int(each) // 2 * 2 for each in share * tokens]

    def logps(self, tokens: int) -> list[float]:
        """Log-probabilities of the `TOP_K` likeliest tokens at each place, flat."""
        scores = torch.randn(tokens, 4 * TOP_K, generator=self.generator).log_softmax(-1)
        return scores.topk(TOP_K).values.flatten().tolist()


def _row(method: str, row: int, tokens: int, draw: _Draw) -> dict[str, Any]:
    kind, half = METHODS[method].rows, 1 if method == "orpo" else tokens // 2
    if kind == "rated":
        return {"prompt_ids": draw.ids(half), "completion_ids": draw.ids(half), "label": row % 2 == 0}
    if kind == "texts":
        texts = {"anchor_ids": draw.ids(tokens), "positive_ids": draw.ids(tokens), "negative_ids": []}
        return {**texts, "score": math.nan}  # no scores: each anchor must find its own text
    if kind == "pairs":
        prompt, chosen, rejected = draw.ids(half), draw.ids(tokens - half), draw.ids(tokens - half)
        return {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}
    ids = draw.ids(tokens)
    if kind == "steps":
        judged = {place: int((place // 16) % 2 == 0) for place in range(15, tokens, 16)}
        return {"input_ids": ids, "labels": [judged.get(place, -100) for place in range(tokens)]}
    if kind == "distill":
        taught = {"teacher_tokens": draw.ids(tokens * TOP_K), "teacher_logps": draw.logps(tokens), "top_k": TOP_K}
        return {"input_ids": ids, "labels": ids, **taught}
    return {"input_ids": ids, "labels": ids}


def _prompt(row: int, asked: list[dict[str, str]], tokenizer: Any) -> dict[str, Any]:
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
    return {"prompt_ids": ids, "prompt": json.dumps(asked), "columns": "{}", "row": row}


def reward_names(method: str) -> list[str]:
    """`method.reward_funcs` for the same functions."""
    file = Path(__file__).with_name("_rewards.py")
    return [f"{file}:{function.__name__}" for function in REWARDS[method]]
