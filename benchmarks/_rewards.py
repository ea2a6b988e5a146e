"""Rewards for benchmarks of methods that sample: shares, so that answers of a model that knows nothing differ in them."""

from __future__ import annotations

from typing import Any


def even(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """The share of even tokens."""
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]


def third(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """The share of tokens that three divides."""
    return [sum(token % 3 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]
