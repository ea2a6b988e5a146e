"""What comes with the product: rows that are generated, and models that are made from a config.

`GENERATED` is the one table of the rows; whoever opens or shows a source asks it. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.builtin import dates, shapes
from engine.config.kinds import BUILTIN_ROWS


@dataclass(frozen=True)
class Generated:
    """A built-in data set: `rows(split, seed, count)` makes it, of as many rows as it says for the split."""

    rows: Callable[[str, int, int | None], list[dict[str, Any]]]
    train: int
    held_out: int
    about: str
    columns: tuple[str, ...] = ("messages",)

    def total(self, split: str) -> int:
        """How many rows a split has."""
        return self.held_out if split == "eval" else self.train


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
        ),
        strict=True,
    )
)
"""The built-in data sets by their paths."""
