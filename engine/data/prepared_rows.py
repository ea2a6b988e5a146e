"""What a prepared row of each kind of method holds: how it is made, measured, cut, judged and counted.

A method's section names its shape (`engine.config.kinds.Rows`); everything that handles rows asks the shape and never the
method. `flaw` is the name of the count under which a row is left out. Language rows are tokenized many at a time, so
`make` is for the others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from engine.config.method import METHODS
from engine.data.embedding_rows import texts_row
from engine.data.pretokenized import IGNORED
from engine.data.prompts import prompt_row
from engine.data.teacher_logprobs import teacher_row

if TYPE_CHECKING:
    from engine.data.parts import Example
    from engine.data.tokens import Tokens

Row = dict[str, Any]
BATCH = 256
"""Rows that are read, rendered and written together."""
OTHER_SORT = "Add rows of the other sort, or choose another method."


class Shape:
    """The parts of a row, by column. Every part is a list of token ids unless `types` says otherwise."""

    columns: tuple[str, ...]
    types: Mapping[str, str] = {}
    """Columns that hold something else, by the name of their Arrow type."""
    one_sort = False
    """Whether what `lacking` finds spoils held-out rows too."""

    def examples(self, example: Example) -> list[Example]:
        """What one row of a source becomes, each a row by itself."""
        return [example]

    def make(self, tokens: Tokens, example: Example, source: Mapping[str, Any]) -> Row:
        """The row of one example; `source` is the row that it was read from."""
        raise NotImplementedError

    def length(self, row: Row) -> int:
        """Tokens of its longest sequence."""
        raise NotImplementedError

    def cut(self, row: Row, limit: int, side: str) -> None:
        """Shorten it in place to at most `limit` tokens; right keeps the start, left keeps the end."""
        raise NotImplementedError

    def flaw(self, row: Row) -> str:
        """The name of the count under which it is left out; empty when it is of use."""
        raise NotImplementedError

    def trained(self, row: Row) -> int:
        """Tokens that are learned from."""
        raise NotImplementedError

    def classes(self, row: Row) -> list[str]:
        """The classes that the row belongs to, where there are any."""
        return [str(row["label"]).lower()] if "label" in row else []

    def lacking(self, rows: Mapping[str, int]) -> tuple[str, str] | None:
        """What is wrong with all rows together and the way out, by the number of rows of each class; None for nothing."""
        return None


class Language(Shape):
    """`input_ids` and `labels`, which repeat the learned ids."""

    columns: tuple[str, ...] = ("input_ids", "labels")

    def length(self, row: Row) -> int:
        return len(row["input_ids"])

    def cut(self, row: Row, limit: int, side: str) -> None:
        part = slice(None, limit) if side == "right" else slice(-limit, None)
        row["input_ids"], row["labels"] = row["input_ids"][part], row["labels"][part]

    def flaw(self, row: Row) -> str:
        # The first token is never predicted, so a label on it alone teaches nothing.
        labels = row["labels"]
        return "masked" if labels.count(IGNORED) - (labels[:1] == [IGNORED]) >= len(labels) - 1 else ""

    def trained(self, row: Row) -> int:
        return len(row["labels"]) - int(row["labels"].count(IGNORED))


class Answers(Shape):
    """`prompt_ids` with answers that follow it."""

    answers: tuple[str, ...]

    def length(self, row: Row) -> int:
        return len(row["prompt_ids"]) + max(len(row[part]) for part in self.answers)

    def cut(self, row: Row, limit: int, side: str) -> None:
        """Right: the answers lose their ends. Left: the prompt loses its beginning, then the answers theirs."""
        if side == "left":
            room = limit - max(len(row[part]) for part in self.answers)
            row["prompt_ids"] = row["prompt_ids"][-room:] if room > 0 else []
            for part in self.answers:
                row[part] = row[part][-limit:]
            return
        room = max(limit - len(row["prompt_ids"]), 0)
        for part in self.answers:
            row[part] = row[part][:room]

    def flaw(self, row: Row) -> str:
        return "" if all(row[part] for part in self.answers) else "masked"

    def trained(self, row: Row) -> int:
        return sum(len(row[part]) for part in self.answers)


class Pairs(Answers):
    """A prompt with a chosen and a rejected answer."""

    columns = ("prompt_ids", "chosen_ids", "rejected_ids")
    answers = ("chosen_ids", "rejected_ids")

    def examples(self, example: Example) -> list[Example]:
        """A ranking gives the pairs that its source asks for, each better answer before the worse ones."""
        count = len(example.ranked)
        places = {
            "best_worst": [(0, count - 1)],
            "best_rest": [(0, worse) for worse in range(1, count)],
            "adjacent": list(itertools.pairwise(range(count))),
            "all": list(itertools.combinations(range(count), 2)),
        }[example.ranking_pairs]
        if not count or len(places) == 1:
            return [example]
        ranked = example.ranked
        return [replace(example, chosen=ranked[good], rejected=ranked[bad], ranked=[]) for good, bad in places]

    def make(self, tokens: Tokens, example: Example, source: Mapping[str, Any]) -> Row:
        prompt, answers, images = tokens.answers(example, [example.chosen, example.rejected])
        return {"prompt_ids": prompt, "chosen_ids": answers[0], "rejected_ids": answers[1], **images}

    def flaw(self, row: Row) -> str:
        return super().flaw(row) or ("identical" if row["chosen_ids"] == row["rejected_ids"] else "")


class Rated(Answers):
    """A prompt with one answer and whether it is good; a pair becomes a row with its good and one with its bad answer."""

    columns = ("prompt_ids", "completion_ids", "label")
    answers = ("completion_ids",)
    types = {"label": "bool_"}

    def examples(self, example: Example) -> list[Example]:
        if example.kind != "preference":
            return [example]
        good, bad = example.chosen, example.rejected
        return [
            replace(example, kind="rated", chosen=answer, rejected=other, label=label)
            for answer, other, label in ((good, bad, True), (bad, good, False))
        ]

    def make(self, tokens: Tokens, example: Example, source: Mapping[str, Any]) -> Row:
        prompt, answers, images = tokens.answers(example, [example.chosen])
        same = bool(example.rejected) and example.rejected == example.chosen
        return {"prompt_ids": prompt, "completion_ids": answers[0], "label": example.label, "identical": same, **images}

    def flaw(self, row: Row) -> str:
        return super().flaw(row) or ("identical" if row.get("identical") else "")

    def lacking(self, rows: Mapping[str, int]) -> tuple[str, str] | None:
        return _of_one_sort(rows, "row", "good answers are only told from bad ones")


class TeacherRows(Language):
    """Ids and labels, and flat, `top_k` entries an id, a teacher's tokens with their log-probabilities."""

    columns = ("input_ids", "labels", "teacher_tokens", "teacher_logps", "top_k")
    types = {"teacher_logps": "floats", "top_k": "int32"}

    def make(self, tokens: Tokens, example: Example, source: Mapping[str, Any]) -> Row:
        return teacher_row(tokens, example)

    def cut(self, row: Row, limit: int, side: str) -> None:
        super().cut(row, limit, side)
        room = limit * row["top_k"]
        for part in ("teacher_tokens", "teacher_logps"):
            row[part] = row[part][:room] if side == "right" else row[part][max(len(row[part]) - room, 0) :]


class Steps(Language):
    """`input_ids`, and in `labels` 1 or 0 at the last token of each judged step."""

    def make(self, tokens: Tokens, example: Example, source: Mapping[str, Any]) -> Row:
        ids, ends = tokens.steps(example)
        labels = [IGNORED] * len(ids)
        for end, verdict in zip(ends, example.verdicts, strict=True):
            labels[end] = int(verdict)
        return {"input_ids": ids, "labels": labels}

    def classes(self, row: Row) -> list[str]:
        return ["true" if label else "false" for label in row["labels"] if label != IGNORED]

    def lacking(self, rows: Mapping[str, int]) -> tuple[str, str] | None:
        return _of_one_sort(rows, "step", "right steps are only told from wrong ones")


def _of_one_sort(rows: Mapping[str, int], what: str, told_apart: str) -> tuple[str, str] | None:
    """What is wrong where all labels are alike; None where both are there."""
    for name, other in (("true", "false"), ("false", "true")):
        if not rows.get(name):
            return f"every {what} is labelled {other}, and {told_apart} where both are there", OTHER_SORT
    return None


class Texts(Shape):
    """An anchor, a positive and perhaps a negative; without one `negative_ids` is empty. Or two texts with a score, which
    is NaN where there is none. All tokens are learned from."""

    texts = ("anchor_ids", "positive_ids", "negative_ids")
    columns = (*texts, "score")
    types = {"score": "float32"}
    one_sort = True

    def make(self, tokens: Tokens, example: Example, source: Mapping[str, Any]) -> Row:
        return texts_row(tokens, example)

    def length(self, row: Row) -> int:
        return max(len(row[part]) for part in self.texts)

    def cut(self, row: Row, limit: int, side: str) -> None:
        for part in self.texts:
            row[part] = row[part][:limit] if side == "right" else row[part][-limit:]

    def flaw(self, row: Row) -> str:
        return "" if row["anchor_ids"] and row["positive_ids"] else "masked"

    def trained(self, row: Row) -> int:
        return sum(len(row[part]) for part in self.texts)

    def classes(self, row: Row) -> list[str]:
        if not math.isnan(row["score"]):
            return ["with a score"]
        return ["without a score, with a negative" if row["negative_ids"] else "without a score"]

    def lacking(self, rows: Mapping[str, int]) -> tuple[str, str] | None:
        if rows == {"without a score": 1}:
            told = "there is one row alone, and a text is only told from those of other rows or from a negative"
            return told, "Add rows, or a negative to this one."
        if "with a score" not in rows or len(rows) == 1:
            return None
        told = " and ".join(f"{count:,} rows {name}" for name, count in sorted(rows.items()))
        return f"there are {told}, which are learned in different ways", "Keep the rows of one sort."


class Prompts(Shape):
    """A prompt alone; `prompt` and `columns` are JSON texts for the rewards. Nothing of it is learned."""

    columns = ("prompt_ids", "prompt", "columns")
    types = {"prompt": "string", "columns": "string"}

    def make(self, tokens: Tokens, example: Example, source: Mapping[str, Any]) -> Row:
        return prompt_row(tokens, example, source)

    def length(self, row: Row) -> int:
        return len(row["prompt_ids"])

    def cut(self, row: Row, limit: int, side: str) -> None:
        row["prompt_ids"] = row["prompt_ids"][:limit] if side == "right" else row["prompt_ids"][-limit:]

    def flaw(self, row: Row) -> str:
        return "" if row["prompt_ids"] else "masked"

    def trained(self, row: Row) -> int:
        return 0


SHAPES: dict[str, Shape] = {
    "language": Language(),
    "pairs": Pairs(),
    "rated": Rated(),
    "steps": Steps(),
    "texts": Texts(),
    "distill": TeacherRows(),
    "prompts": Prompts(),
}


def shape_of(method: str) -> Shape:
    """The shape of the rows that this kind of method learns from."""
    return SHAPES[METHODS[method].rows]
