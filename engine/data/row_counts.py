"""What became of the rows of a split: how many were read, kept, cut and left out, what a person is told of it, and when it
is reason to refuse them.

Counts go with the prepared rows; rows that are left out are never left out in silence.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.data.mapped import Rows
from engine.data.plan import Plan
from engine.data.prepared_rows import Row, shape_of
from engine.errors import DataError, visible
from engine.facts.template_flaws import TEMPLATE_FLAWS

NAMED = 8
QUANTILES = 1000
MOST_LONGER = 4
"""Times as long as `data.max_length` that a row may be for raising it to be the first thing to try."""


@dataclass
class Counts:
    """What became of the rows. `longest` and `lengths` are before cutting; tokens are those kept."""

    read: int = 0
    kept: int = 0
    bad: int = 0
    too_long: int = 0
    dropped: int = 0
    truncated: int = 0
    split: int = 0
    masked: int = 0
    identical: int = 0
    duplicates: int = 0
    """Rows that say what an earlier one says, which are not among those read."""
    packs: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    longest: int = 0
    image_tokens: int = 0
    """Of the row that has the most of them."""
    images: int = 0
    all_image_tokens: int = 0
    image_pixels: int = 0
    bad_row: str = ""
    """The first row that cannot be read, and why."""
    bad_rows: list[str] = field(default_factory=list)
    """The first `NAMED` of them."""
    classes: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    template_flaws: dict[str, tuple[int, str]] = field(default_factory=dict)
    """How many rows have which flaw of the chat template, and where the first of them stands."""
    first_at: dict[str, str] = field(default_factory=dict)
    """Where the first row stands that is dropped, truncated, split, masked or identical."""

    def sentences(self) -> list[str]:
        """What a person should know before launch; nothing when every row is used as it is."""
        said = []
        words = {
            "bad": "cannot be read and are left out",
            "dropped": "are longer than data.max_length and are left out",
            "truncated": "are longer than data.max_length and are cut",
            "split": "are longer than data.max_length and are split",
            "masked": "hold nothing to learn and are left out",
            "identical": "have the same chosen and rejected answer and are left out",
        }
        for name, what in words.items():
            if number := getattr(self, name):
                first = f"; the first: {self.first_at[name]}" if name in self.first_at else ""
                said.append(f"{number:,} of {self.read:,} rows {what}{first}")
        if self.duplicates:
            what = "row says" if self.duplicates == 1 else "rows say"
            left = "is left out" if self.duplicates == 1 else "are left out"
            said.append(f"{self.duplicates:,} {what} exactly what an earlier one says and {left}")
        for name, (number, first) in self.template_flaws.items():
            flaw = TEMPLATE_FLAWS[name]
            what = flaw.one if number == 1 else flaw.many
            said.append(f"{number:,} of {self.read:,} rows {what}; the first: {first}")
        return [*said, *self.notes]

    def flawed(self, name: str, rows: Rows, index: int) -> None:
        """Count a row that has this flaw of the chat template."""
        number, first = self.template_flaws.get(name) or (0, "")
        self.template_flaws[name] = (number + 1, first or _at(rows, index))

    def became(self, what: str, plan: Plan, row: Row) -> None:
        """Count a row that is dropped, truncated, split, masked or identical; one that is looked at alone has no number."""
        setattr(self, what, getattr(self, what) + 1)
        if what not in self.first_at and "row" in row:
            number, index = _locate(plan, row["row"])
            self.first_at[what] = _at(plan.sources[number].rows, index)


def _at(rows: Rows, index: int) -> str:
    """File and line of a row, or its number where a file has no lines."""
    path, line = rows.place(index)
    return f"{visible(path)}:{line}" if line else f"{visible(path)}, {rows.named(index)}"


def _locate(plan: Plan, row: int) -> tuple[int, int]:
    """Which source a row stands in, and where, by its number over all sources."""
    bases = [plan.base(number) for number in range(len(plan.sources))]
    number = max(index for index, base in enumerate(bases) if base <= row)
    return number, row - bases[number]


def facts_of_counts(plan: Plan, counts: Counts, lengths: array[int]) -> dict[str, Any]:
    """The fields of `DataFacts` that counts tell; `lengths` are those of the rows before cutting."""
    ranked = sorted(lengths)
    picks = min(len(ranked), QUANTILES)
    quantiles = [ranked[(len(ranked) - 1) * step // max(picks - 1, 1)] for step in range(picks)]
    rows = counts.packs or counts.kept
    return {
        "rows": rows if plan.split == "train" else None,
        "eval_rows": rows if plan.split != "train" else None,
        "tokens": counts.tokens,
        "trained_tokens": counts.trained_tokens,
        "longest": counts.longest,
        "image_tokens": counts.image_tokens,
        "images": counts.images,
        "all_image_tokens": counts.all_image_tokens,
        "image_pixels": counts.image_pixels,
        "truncated": counts.too_long,
        "masked": counts.masked,
        "dropped": counts.dropped,
        "identical": counts.identical,
        "duplicates": counts.duplicates,
        "template_flaws": [[name, *found] for name, found in counts.template_flaws.items()],
        "first_at": [list(found) for found in counts.first_at.items()],
        "bad": counts.bad,
        "bad_row": counts.bad_row,
        "read": counts.read,
        "packing_efficiency": counts.tokens / (counts.packs * plan.max_length) if counts.packs else None,
        "lengths": quantiles,
        "exact": True,
    }


class Refused(DataError):
    """Rows that training would not take; `facts` says what was counted of them all the same."""

    def __init__(self, problem: DataError, facts: Mapping[str, Any], *, counted: bool) -> None:
        super().__init__(problem.message, problem.hint)
        self.mends = problem.mends
        self.path, self.line, self.column = problem.path, problem.line, problem.column
        self.facts = facts
        self.counted = counted
        """Whether the counts themselves say why."""


def refuse_useless(plan: Plan, counts: Counts, too_long: list[int]) -> None:
    """Raises `DataError` for rows that training would not take. `too_long` has the numbers of rows that are refused for it."""
    if counts.bad and plan.on_bad_row == "error":
        problem = DataError(counts.bad_row, "Mend the rows, or set data.on_bad_row to skip.")
        raise problem.mended_by({"data.on_bad_row": "skip"})
    if too_long:
        others = "" if len(too_long) == 1 else f"{len(too_long):,} of {counts.read:,} rows are, the longest with "
        longer = [{"data.max_length": counts.longest}] if counts.longest <= MOST_LONGER * plan.max_length else []
        problem = too_long_error(plan, too_long[0], f"{others}{counts.longest:,} tokens")
        raise problem.mended_by(*longer, {"data.excess_length": "drop"})
    if not counts.kept:
        few = any(source.weight < 1 and source.count() for source in plan.sources)
        none = "a weight below 1 leaves none of so few rows" if few else "no rows were read"
        raise nothing_left(plan.named, "; ".join(counts.sentences()) or none)
    shape = shape_of(plan.method)
    if (plan.split == "train" or shape.one_sort) and (lack := shape.lacking(counts.classes)):
        raise DataError(f"{plan.named}: {lack[0]}", lack[1], path="")


def nothing_left(named: str, reasons: str) -> DataError:
    """The refusal of a split whose rows are all left out; `named` is the setting that names them."""
    return DataError(
        f"{named}: nothing is left to {'train on' if named == 'data.train' else 'measure'}: {reasons}.",
        "Bring other rows, or change what leaves these out: data.max_length, data.trained_turns or the source's columns "
        "and weight.",
        path="",
    )


def too_long_error(plan: Plan, row: int, how: str) -> DataError:
    """The refusal of a row that is longer than `data.max_length`, by its number."""
    number, index = _locate(plan, row)
    # A row that is named by the byte where it begins has no number that says anything.
    named = "the row" if plan.bases and plan.bases[0] else f"row {index:,}"
    return plan.sources[number].rows.error(
        index,
        f"{named} is longer than data.max_length {plan.max_length} ({how})",
        "Set data.excess_length to drop or truncate, or raise data.max_length.",
    )
