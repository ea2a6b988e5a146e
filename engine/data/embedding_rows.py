"""Rows of texts and how much they mean the same: an anchor and a positive, perhaps with a negative, or two texts with a score.

The ids are what the tokenizer gives for a text by itself, so that the model sees in use what it saw in training.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from engine.data.parts import Encoder, Example, FormatError, Row, kind_of, text_of
from engine.errors import visible

NEGATIVE = ("negative", "neg")
"""Names of the column of negatives."""
SCORE = ("score", "similarity_score", "similarity")
"""Names of the column of scores."""
_SEVERAL = re.compile(r"(hard_)?neg(ative)?s?(_?\d+)?")
"""Names of columns that hold one negative of several, or a list of them."""
ONLY_SCORED = ("sentence1", "text1", "sentence_A")
"""Names of a first text that say nothing of its meaning: without a score the other need not be a positive."""


def is_meaning(row: Row, columns: Mapping[str, str]) -> bool:
    """Whether the row looks like texts that belong together, or like two texts with a score."""
    return columns.get("anchor") not in ONLY_SCORED or any(row.get(name) is not None for name in SCORE)


def read_texts(row: Row, columns: Mapping[str, str]) -> Example:
    """Two texts or three, or two with a score; the negative may be left out. Raises `FormatError`."""
    # The first row, which gives the names of the columns, may be one without a negative or a score.
    for part, known in (("negative", NEGATIVE), ("score", SCORE)):
        if part not in columns:
            columns = {**columns, part: next((name for name in known if row.get(name) is not None), known[0])}
    example = Example(
        "texts",
        prompt=text_of(row, columns, "anchor"),
        chosen=text_of(row, columns, "positive"),
        rejected=text_of(row, columns, "negative", ""),
        score=_score(row.get(columns["score"]), columns["score"]),
    )
    if columns["negative"] in NEGATIVE and not example.rejected:
        _refuse_several(row)
    if example.score is not None and example.rejected:
        raise FormatError(
            f"column {visible(columns['score'])} says how alike two texts are, and the row has a third in "
            f"{visible(columns['negative'])}; leave one of them out"
        )
    return example


def _refuse_several(row: Row) -> None:
    """Raises `FormatError` for negatives that nobody named and that would be left out."""
    if further := [visible(name) for name in row if _SEVERAL.fullmatch(name) and row[name]]:
        raise FormatError(
            f"the row holds negatives in {' and '.join(further[:3])}, and one column named negative is read",
            f"Name one of them under the source's columns, as negative: {further[0]}.",
        )


def _score(value: Any, column: str) -> float | None:
    if value is None:
        return None
    try:
        score = float(value)
    except (TypeError, ValueError):
        score = math.nan
    if isinstance(value, bool) or not math.isfinite(score):
        raise FormatError(f"column {visible(column)} must hold a number, how alike the texts are; got {kind_of(value)}")
    return score


def texts_row(tokens: Encoder, example: Example) -> dict[str, Any]:
    """The ids of each text with the tokenizer's own special tokens, no ids for no negative, and the score or NaN."""
    ids = tokens.texts([str(text or "") for text in (example.prompt, example.chosen, example.rejected)])
    named = dict(zip(("anchor_ids", "positive_ids", "negative_ids"), ids, strict=True))
    return {**named, "score": math.nan if example.score is None else example.score}
