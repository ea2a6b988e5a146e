"""What comes with the product: rows that are generated, and models that are made from a config.

`GENERATED` is the one table of the rows; whoever opens or shows a source asks it. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.builtin import dates, shapes, synthetic
from engine.config.kinds import BUILTIN_ROWS


@dataclass(frozen=True)
class Generated:
    """A built-in data set: `rows(split, seed, count)` makes it, of as many rows as it says for the split."""

    rows: Callable[..., Sequence[dict[str, Any]]]
    train: int
    held_out: int
    about: str
    columns: tuple[str, ...] = ("messages",)
    format: str = "messages"
    sized: tuple[str, ...] = ()
    """What a source says of the size of such rows, by its keys beside `rows`; empty where they are as they are."""

    def total(self, split: str, asked: int | None = None) -> int:
        """How many rows a split has, `asked` being the source's own number."""
        have = self.held_out if split == "eval" else self.train
        return asked if asked is not None and self.sized else have

    def of(
        self, source: Mapping[str, Any], split: str, seed: int, count: int | None = None
    ) -> Sequence[dict[str, Any]]:
        """The rows of a source as its config describes it, at most `count`. Raises ValueError for a split there is not."""
        if self.sized:
            total = self.total(split, source.get("rows"))
            count = total if count is None else min(count, total)
        return self.rows(split, seed, count, **{key: source.get(key) for key in self.sized})


GENERATED: Mapping[str, Generated] = dict(
    zip(
        BUILTIN_ROWS,
        (
            Generated(dates.rows, dates.TRAIN_ROWS, dates.HELD_OUT_DAYS, "generated questions and answers"),
            Generated(
                shapes.rows,
                shapes.TRAIN_ROWS,
                shapes.HELD_OUT_ROWS,
                "drawn pictures with questions and answers",
                ("images", "messages"),
            ),
            Generated(
                synthetic.rows,
                synthetic.TRAIN_ROWS,
                synthetic.HELD_OUT_ROWS,
                "tokens drawn by chance",
                ("tokens", "seed"),
                "synthetic",
                ("tokens", "min_tokens"),
            ),
        ),
        strict=True,
    )
)
"""The built-in data sets by their paths."""
