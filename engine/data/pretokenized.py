"""Rows that are tokens already: ids, and labels that repeat what is learned of them. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any

from engine.data.parts import FormatError, Row, kind_of
from engine.errors import visible

IGNORED = -100
"""The label of a token that is read and not learned."""


def ids_of(row: Row, columns: Mapping[str, str]) -> tuple[list[int], list[int] | None]:
    """The row's `input_ids`, and as many `labels` where it has some, without the padding that its `attention_mask` tells.
    Raises `FormatError`."""
    found: dict[str, Any] = {}
    for part in ("input_ids", "labels"):
        column = columns.get(part, part)
        found[part] = value = row.get(column)
        if value is not None and not (isinstance(value, list) and all(type(token) is int for token in value)):
            raise FormatError(f"column {visible(column)} must hold a list of whole numbers; got {kind_of(value)}")
    ids, labels = found["input_ids"] or [], found["labels"]
    if labels is not None and len(labels) != len(ids):
        raise FormatError(f"labels hold {len(labels)} numbers and input_ids {len(ids)}; they must be as many")
    real = real_tokens(row, columns, len(ids))
    if real is None:
        return ids, labels
    return list(compress(ids, real)), None if labels is None else list(compress(labels, real))


def real_tokens(row: Row, columns: Mapping[str, str], count: int) -> list[int] | None:
    """For each of the row's `count` tokens 0 where it is padding, by its `attention_mask`; None where it has none. Raises
    `FormatError`."""
    column = columns.get("attention_mask", "attention_mask")
    mask = row.get(column)
    if mask is None:
        return None
    must = f"column {visible(column)} must hold a 0 or a 1 for each of the {count} input_ids"
    if not isinstance(mask, list) or len(mask) != count:
        raise FormatError(must)
    strange = next((each for each in mask if each not in (0, 1)), None)
    if strange is None:
        return mask
    if all(type(each) is int and each >= 0 for each in mask):
        raise FormatError(
            f"{must}; got {strange}, as collators that pack number the documents of a pack",
            "Give each document a row of its own, which data.packing packs again, or write 1 for every token that is read.",
        )
    raise FormatError(f"{must}; got {visible(str(strange))}")


def refuse_strange(ids: Sequence[int], labels: Sequence[int] | None, size: int, way_out: str) -> None:
    """Raises `FormatError` for the first id that is no token of a vocabulary of `size`, or label that is none either.

    A label that the loss does not know would teach another token, or the row could not be read on a GPU.
    """
    strange = next((token for token in ids if not 0 <= token < size), None)
    if strange is not None:
        raise FormatError(f"input_ids: token {strange} is not in the vocabulary of {size:,} tokens", way_out)
    strange = next((label for label in labels or () if label != IGNORED and not 0 <= label < size), None)
    if strange is not None:
        raise FormatError(
            f"labels: {strange} is not in the vocabulary of {size:,} tokens",
            f"Give the token that is learned, or {IGNORED} where none is.",
        )
