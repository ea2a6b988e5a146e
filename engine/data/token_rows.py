"""From places in the sources to rows of token ids: read, rendered, tokenized, and held to the policies on length.

What the preview shows and what training reads is made here alone. A batch is rendered in the template's own process while
the one before it is tokenized here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from engine.data.chat import Chat, Conversation
from engine.data.chat_masks import Rendered
from engine.data.chat_template import MaskError
from engine.data.parts import Example
from engine.data.plan import Plan
from engine.data.prepared_rows import BATCH, SHAPES, Row, Shape, shape_of
from engine.data.rendering import Sent
from engine.data.row_counts import NAMED, Counts
from engine.data.tokens import Piece, Tokens
from engine.data.vision import pixels_of
from engine.errors import DataError, WorkbenchError

LANGUAGE = SHAPES["language"]


def token_rows(plan: Plan, tokens: Tokens, order: Sequence[tuple[int, int]], counts: Counts) -> Iterator[Row]:
    """Kept rows in order, each with `row` (its number over all sources) and `length` (before cutting)."""
    batches = (order[start : start + BATCH] for start in range(0, len(order), BATCH))
    ahead: _Batch | None = None
    for part in batches:
        batch = _Batch(plan, tokens, part)
        if ahead is not None:
            ahead.take()
        # The template renders these in its own process while those before are tokenized here.
        batch.send()
        if ahead is not None:
            yield from ahead.rows(counts)
        ahead = batch
    if ahead is not None:
        ahead.take()
        yield from ahead.rows(counts)


class _Batch:
    """Rows that are read together: sent to be rendered, taken back, then tokenized."""

    def __init__(self, plan: Plan, tokens: Tokens, part: Sequence[tuple[int, int]]) -> None:
        self._plan, self._tokens = plan, tokens
        self._language = shape_of(plan.method) is LANGUAGE
        self._bases = {number: plan.base(number) for number in {number for number, _ in part}}
        self._read = [(number, index, *found) for number, index in part if (found := self._example(number, index))]
        examples = [example for *_, example in self._read if isinstance(example, Example)]
        self._asked: dict[int, tuple[Chat, list[tuple[Example, Conversation]]]] = {}
        for example in examples if self._language else ():
            own = tokens.of(example)
            if own.chat is not None and (each := own.conversation(example)) is not None:
                self._asked.setdefault(id(own), (own.chat, []))[1].append((example, each))
        self._sent: list[Sent] = []
        self._rendered: dict[int, Rendered | MaskError] = {}

    def _example(self, number: int, index: int) -> tuple[Any, Example | WorkbenchError] | None:
        """What a row holds, and its example or why it has none; None where it is not there."""
        try:
            example, given = self._plan.example(number, index)
            return given, example
        except IndexError:
            return None  # the source turned out shorter: only the lazy order of the preview asks past its end
        except WorkbenchError as problem:
            return None, problem

    def send(self) -> None:
        """Have the conversations rendered."""
        self._sent = [chat.send([each for _, each in asked]) for chat, asked in self._asked.values()]

    def take(self) -> None:
        """Wait until they are."""
        for (chat, asked), sent in zip(self._asked.values(), self._sent, strict=True):
            found = chat.take(sent, [each for _, each in asked])
            self._rendered |= {id(example): one for (example, _), one in zip(asked, found, strict=True)}

    def rows(self, counts: Counts) -> Iterator[Row]:
        """Kept rows. Raises `DataError` for the first that is bad where that is to end everything."""
        plan, tokens, shape = self._plan, self._tokens, shape_of(self._plan.method)
        pieces: list[Piece] = []
        at: list[tuple[int, int]] = []
        made: list[Row] = []
        for number, index, given, example in self._read:
            try:
                if isinstance(example, WorkbenchError):
                    raise example
                own = tokens.of(example)
                if self._language:
                    pieces.append(own.piece(example, self._rendered.get(id(example))))
                    at.append((number, index))
                else:
                    rows = [shape.make(own, each, given) for each in shape.examples(example)]
                    made += [{**row, "flaws": own.flaws(row)} for row in rows]
                    at += [(number, index)] * len(rows)
            except WorkbenchError as problem:
                counts.read += 1
                placed = _placed(problem, plan.sources[number].rows, index)
                if plan.on_bad_row == "error" and not plan.count_all:
                    raise placed from None
                counts.bad += 1
                counts.bad_row = counts.bad_row or placed.full_message
                if len(counts.bad_rows) < NAMED:
                    counts.bad_rows.append(placed.message)
        if pieces:
            made = [{**row, "flaws": tokens.flaws(row)} for row in tokens.rows(pieces)]
        counts.read += len(made)
        for (number, index), row in zip(at, made, strict=True):
            row["row"] = self._bases[number] + index
            for flaw in row["flaws"]:
                counts.flawed(flaw, plan.sources[number].rows, index)
            yield from fit(plan, row, counts)


def _placed(problem: WorkbenchError, rows: Any, index: int) -> DataError:
    if isinstance(problem, DataError) and problem.path:
        return problem
    if rows.named(index) in rows.error(index, "").message:
        return rows.error(index, problem.message, problem.hint)  # it says by itself which row it is
    return rows.error(index, f"{rows.named(index)}: {problem.message}", problem.hint)


def fit(plan: Plan, row: Row, counts: Counts) -> Iterator[Row]:
    """What remains of a row by the policies on length and on nothing to learn: none, one, or several windows."""
    shape = shape_of(plan.method)
    length = row["length"] = shape.length(row)
    counts.longest = max(counts.longest, length)
    cut = False
    if length > plan.max_length:
        counts.too_long += 1
        if plan.excess_length == "error":
            row["rejected_for"] = "length"
            yield row
            return
        images = row.get("image_tokens") or []
        # What would be cut off an image ends the row: a model cannot see a part of one.
        cuts_image = bool(images) and (
            plan.excess_length == "split" or plan.truncation_side == "left" or images[-1] >= plan.max_length
        )
        if plan.excess_length == "drop" or cuts_image:
            counts.became("dropped", plan, row)
            return
        piece = row.get("piece")
        if plan.excess_length == "split" and piece is not None and piece.special:
            counts.became("split", plan, row)
            yield from _windows(row, plan.max_length, shape, counts)
            return
        shape.cut(row, plan.max_length, plan.truncation_side)
        counts.became("truncated", plan, row)
        cut = True
        row["side"] = plan.truncation_side
    row["cut"] = cut
    if flaw := shape.flaw(row):
        counts.became(flaw, plan, row)
    else:
        yield _counted(row, shape, counts)


def _windows(row: Row, limit: int, shape: Shape, counts: Counts) -> Iterator[Row]:
    for start in range(0, len(row["input_ids"]), limit):
        part = slice(start, start + limit)
        window = {**row, "input_ids": row["input_ids"][part], "labels": row["labels"][part], "cut": True}
        if not shape.flaw(window):
            yield _counted(window, shape, counts)


def _counted(row: Row, shape: Shape, counts: Counts) -> Row:
    counts.kept += 1
    counts.tokens += shape.length(row)
    counts.trained_tokens += shape.trained(row)
    if row.get("image_tokens"):
        drawn = len(row["image_tokens"])
        counts.images += len(row["images"])
        counts.all_image_tokens += drawn
        counts.image_pixels += sum(map(pixels_of, row["images"]))
        counts.image_tokens = max(counts.image_tokens, drawn)
    for name in shape.classes(row):
        counts.classes[name] = counts.classes.get(name, 0) + 1
    return row
