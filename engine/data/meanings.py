"""Rows of texts that mean the same, and perhaps one that does not: an anchor, a positive, a negative."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engine.data.parts import Example, Row, text_of

if TYPE_CHECKING:
    from engine.data.tokens import Tokens

NEGATIVE = ("negative", "neg")
"""Names of the column of negatives."""


def read_texts(row: Row, columns: Mapping[str, str]) -> Example:
    """Two texts or three; the negative may be left out. Raises `FormatError`."""
    if "negative" not in columns:
        # The first row, which gives the names of the columns, may be one without a negative.
        columns = {**columns, "negative": next((name for name in NEGATIVE if row.get(name) is not None), NEGATIVE[0])}
    return Example(
        "texts",
        prompt=text_of(row, columns, "anchor"),
        chosen=text_of(row, columns, "positive"),
        rejected=text_of(row, columns, "negative", ""),
    )


def texts_row(tokens: Tokens, example: Example) -> dict[str, Any]:
    """The ids of each text with the tokenizer's own special tokens and its end mark; no ids for no negative."""
    texts = [example.prompt, example.chosen, example.rejected]
    ids = [tokens.text(str(text)) if text else [] for text in texts]
    return dict(zip(("anchor_ids", "positive_ids", "negative_ids"), ids, strict=True))
