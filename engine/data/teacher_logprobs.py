"""Rows that a teacher went over before: at each token its most likely tokens and their log-probabilities.

`target_token_ids` and `target_logprobs` hold one list a token of `input_ids`, for that token given all before it, as
servers give them for a prompt. A list may be empty: such a token is read and not learned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import compress
from typing import Any

from engine.data.parts import Encoder, Example, FormatError, Row, kind_of
from engine.data.pretokenized import IGNORED, ids_of, real_tokens, refuse_strange
from engine.errors import visible

NOTHING = -1e9
"""The log-probability of a place in the table that the teacher did not fill."""
_ROUNDING = 1e-3
_SUM_ROUNDING = 0.02
"""By how much a place's probabilities may exceed 1: log-probabilities are often stored in 16 bits."""


def read_teacher_row(row: Row, columns: Mapping[str, str]) -> Example:
    """Tokens, and for each the teacher's tokens and log-probabilities. Raises `FormatError` naming the place."""
    name = {part: visible(columns.get(part, part)) for part in ("target_token_ids", "target_logprobs")}
    targets, logprobs = (row.get(columns.get(part, part)) for part in name)
    ids, labels = ids_of(row, columns)
    count = len(row.get(columns.get("input_ids", "input_ids")) or ())
    real = real_tokens(row, columns, count)
    for part, given in (("target_token_ids", targets), ("target_logprobs", logprobs)):
        if not isinstance(given, list) or not all(each is None or isinstance(each, list) for each in given):
            raise FormatError(f"column {name[part]} must hold a list of lists, one a token; got {kind_of(given)}")
        if len(given) != count:
            raise FormatError(f"{name[part]} holds {len(given)} lists and input_ids {count}; they must be as many")
    assert isinstance(targets, list)
    assert isinstance(logprobs, list)
    pairs = [(each or [], other or []) for each, other in zip(targets, logprobs, strict=True)]
    for place, (each, other) in enumerate(pairs):
        if real is None or real[place]:
            _check(place, each, other, name)
    if real is not None:
        pairs = list(compress(pairs, real))
    return Example("taught", input_ids=ids, labels=labels, targets=pairs)


def _check(place: int, ids: list[Any], logprobs: list[Any], name: Mapping[str, str]) -> None:
    if len(ids) != len(logprobs):
        raise FormatError(
            f"token {place}: {len(ids)} target tokens and {len(logprobs)} log-probabilities; they must match"
        )
    if not all(type(token) is int and token >= 0 for token in ids):
        raise FormatError(
            f"token {place}: {name['target_token_ids']} must hold whole numbers from 0; got {kind_of(ids)}"
        )
    for value in logprobs:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value) or value > _ROUNDING:
            raise FormatError(
                f"token {place}: {name['target_logprobs']} must hold logarithms of probabilities, at most 0; got "
                f"{visible(str(value))}"
            )
    if len(set(ids)) < len(ids):
        twice = next(token for token in ids if ids.count(token) > 1)
        raise FormatError(f"token {place}: {name['target_token_ids']} must name each token once; got {twice} again")
    if (total := math.fsum(map(math.exp, logprobs))) > 1 + _SUM_ROUNDING:
        raise FormatError(
            f"token {place}: {name['target_logprobs']} must hold natural logarithms of one token's probabilities, which "
            f"add up to at most 1; got {total:.2f}"
        )


def teacher_row(tokens: Encoder, example: Example) -> dict[str, Any]:
    """The row as training reads it: the teacher's table flat, `top_k` entries a token. Raises `FormatError`."""
    size = len(tokens.tokenizer)
    way_out = "Teacher and model must share their vocabulary: choose the model's own teacher."
    refuse_strange(example.input_ids, example.labels, size, way_out)
    largest = max((token for ids, _ in example.targets for token in ids), default=0)
    if largest >= size:
        raise FormatError(f"token {largest} is not in the vocabulary of {size:,} tokens", way_out)
    top_k = max((len(ids) for ids, _ in example.targets), default=0)
    row: dict[str, Any] = {"input_ids": example.input_ids, "top_k": top_k, "teacher_tokens": [], "teacher_logps": []}
    for ids, logprobs in example.targets:
        rest = top_k - len(ids)
        row["teacher_tokens"] += [*ids, *[0] * rest]
        row["teacher_logps"] += [*(max(float(value), NOTHING) for value in logprobs), *[NOTHING] * rest]
    given = example.labels if example.labels is not None else example.input_ids
    row["labels"] = [label if ids else IGNORED for label, (ids, _) in zip(given, example.targets, strict=True)]
    return row
