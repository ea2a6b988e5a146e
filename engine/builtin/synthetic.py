"""`builtin/synthetic`: rows of so many tokens, drawn by chance, for benchmarks and tests.

A row here says how long it is and the seed of its tokens; they are drawn from the vocabulary where the tokenizer is known
(`engine.data.synthetic`). Each row is drawn by itself, so a million of them are there at once.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, overload

from engine.config.kinds import TOKENS

TRAIN_ROWS = 1_000
HELD_OUT_ROWS = 100

Row = dict[str, Any]


class SyntheticRows(Sequence[Row]):
    """`count` rows of `least` to `most` tokens, the same for one split and seed on any machine."""

    def __init__(self, split: str, seed: int, count: int, least: int, most: int) -> None:
        self._named, self._count, self._least, self._most = f"builtin/synthetic {split} {seed}", count, least, most

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        """All that decides which rows these are."""
        return f"{self._named}: {self._count} of {self._least} to {self._most}"

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(self._count))]
        if not 0 <= index < self._count:
            raise IndexError(index)
        draw = random.Random(f"{self._named} {index}")
        length = self._least + int(draw.random() * (self._most - self._least + 1))
        return {"tokens": length, "seed": int(draw.random() * 2**48), "label": index % 2 == 0}


def rows(
    split: str = "train",
    seed: int = 0,
    count: int | None = None,
    *,
    tokens: int | None = None,
    min_tokens: int | None = None,
) -> SyntheticRows:
    """Rows of exactly `tokens` tokens, or of `min_tokens` up to that; 1,000 for training and 100 held-out ones by default.

    Raises ValueError for a split that there is not.
    """
    if split not in ("train", "eval"):
        raise ValueError(f"split must be train or eval; got {split!r}")
    most = tokens or TOKENS
    total = HELD_OUT_ROWS if split == "eval" else TRAIN_ROWS
    return SyntheticRows(split, seed, total if count is None else count, min(min_tokens or most, most), most)
