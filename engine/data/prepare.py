"""From a config and a processing class to the rows that are trained, counted, cached and memory-mapped.

Every row that is left out or cut is counted and the counts go with the result; rows that hold nothing to learn are never
trained on. Prepared rows are an Arrow file under a key of everything that changes tokens (`engine.data.cache`), so an
unchanged config starts at once. `prepare` is what the trainers call; `token_rows` is what the preview shares with it.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engine.config.facts import DataFacts, counting_limits
from engine.config.tree import RunConfig
from engine.data.cache import IMAGES, Store, about, key_of
from engine.data.cache_entries import Held
from engine.data.chat import Chat, Conversation, Rendered
from engine.data.chat_template import MaskError
from engine.data.duplicates import leave_out_duplicates
from engine.data.held_out import hold_out
from engine.data.image_references import stamp_image
from engine.data.mapped import Rows
from engine.data.packing import best_fit
from engine.data.parts import Example
from engine.data.plan import Plan, Progress, plan_of, use_template
from engine.data.prepared_rows import SHAPES, Shape, shape_of
from engine.data.rendering import Sent
from engine.data.streaming.files import looked_at_plan
from engine.data.tokens import Piece, Tokens
from engine.data.vision import pixels_of
from engine.errors import Cancelled, DataError, WorkbenchError, visible
from engine.facts.counts import held_out_of
from engine.facts.template_flaws import TEMPLATE_FLAWS
from engine.run.data_record import RowHashes

BATCH = 256
FIXED_ROWS = 16
QUANTILES = 1000
UNCOLLECTED = 200_000
"""Objects that are made before garbage is looked for while rows are prepared."""
NAMED = 8
MOST_LONGER = 4
"""Times as long as `data.max_length` that a row may be for raising it to be the first thing to try."""
LANGUAGE = SHAPES["language"]

Row = dict[str, Any]


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
            number, index = _found(plan, row["row"])
            self.first_at[what] = _at(plan.sources[number].rows, index)


def _at(rows: Rows, index: int) -> str:
    """File and line of a row, or its number where a file has no lines."""
    path, line = rows.place(index)
    return f"{visible(path)}:{line}" if line else f"{visible(path)}, {rows.named(index)}"


def _found(plan: Plan, row: int) -> tuple[int, int]:
    """Which source a row stands in, and where, by its number over all sources."""
    bases = [plan.base(number) for number in range(len(plan.sources))]
    number = max(index for index, base in enumerate(bases) if base <= row)
    return number, row - bases[number]


class Refused(DataError):
    """Rows that training would not take; `facts` says what was counted of them all the same."""

    def __init__(self, problem: DataError, facts: Mapping[str, Any], *, counted: bool) -> None:
        super().__init__(problem.message, problem.hint)
        self.mends = problem.mends
        self.path, self.line, self.column = problem.path, problem.line, problem.column
        self.facts = facts
        self.counted = counted
        """Whether the counts themselves say why."""


@dataclass(frozen=True)
class Prepared:
    """A memory-mapped data set with what is known of it."""

    dataset: Any
    facts: DataFacts
    fingerprint: str
    counts: dict[str, Any]
    warnings: tuple[str, ...]
    cached: bool
    fixed: list[Row]
    folder: Path
    hashes: RowHashes
    sources: tuple[str, ...]
    stream: Any = None
    """What rows are read from while training (`engine.data.streaming`); `dataset` then holds the first of them alone."""
    held: Held | None = None
    """Keeps the prepared rows from being removed while this is there."""


def prepare(
    config: RunConfig,
    processing_class: Any,
    split: str = "train",
    on_progress: Progress | None = None,
    *,
    count_all: bool = False,
) -> Prepared:
    """The prepared rows of one split, from the cache where nothing changed. Raises `DataError` naming the row.

    With `count_all` a row that cannot be read is counted, and they are refused together at the end, as `Refused`.
    """
    use_template(config, processing_class)
    progress = on_progress or (lambda what, done, total: None)
    plan = plan_of(config, processing_class, split, progress, tolerant=count_all)
    plan.count_all = count_all
    if not plan.sources:
        raise DataError(f"data.{split} names no rows", "Add a source with its path.")
    hold_out(plan, progress)
    store = Store(plan.prepared_path)
    key = key_of(plan, processing_class, progress)
    with store.lock(key, progress) as report:
        if (folder := store.find(key)) is not None:
            return _open(folder, plan, cached=True)
        with store.building(key) as folder, _seldom_collected():
            _build(plan, processing_class, folder, report)
            plan.refuse_changed()
        return _open(store.path(key), plan, cached=False)


SAMPLE = 512
_OF_ALL = ("tokens", "trained_tokens", "images", "all_image_tokens", "image_pixels")


def count(
    config: RunConfig, processing_class: Any, split: str, on_progress: Progress | None = None, sample: int | None = None
) -> dict[str, Any]:
    """What is known of one split's rows before training, as the fields of `DataFacts`: never raises for what the rows
    hold, which is part of the answer. `sample` counts so many rows, spread over all, and keeps nothing."""
    facts: dict[str, Any]
    try:
        streamed = config.data.streaming and split == "train"
        if sample is not None or streamed:
            facts = _sampled(config, processing_class, split, sample or SAMPLE, streamed=streamed)
        else:
            facts = facts_of(prepare(config, processing_class, split, on_progress, count_all=True))
    except Refused as refused:
        place = f"{refused.path}:{refused.line}" if refused.line else refused.path
        at = place if refused.facts["truncated"] else ""
        facts = {
            **refused.facts,
            **_UNKNOWN,
            "too_long_at": at,
            "problem": "" if refused.counted else refused.full_message,
        }
    except Cancelled:
        raise
    except WorkbenchError as problem:
        facts = {"problem": problem.full_message}
    return {**facts, "limits": list(counting_limits(config))}


def facts_of(prepared: Prepared) -> dict[str, Any]:
    """What the prepared rows of one split are, as the fields of `DataFacts`."""
    facts = {**asdict(prepared.facts), "counts": prepared.counts, "warnings": list(prepared.warnings)}
    return facts | {"fingerprint": prepared.fingerprint, "cached": prepared.cached}


def of_both(facts: dict[str, Any], held_out: dict[str, Any] | None) -> dict[str, Any]:
    """What is known of all rows: of those to train on, with what is known of those held out."""
    facts.setdefault("warnings", [])
    if held_out is not None:
        facts["eval_rows"], facts["held_out"] = held_out.get("eval_rows"), held_out
        facts["warnings"] += [f"held-out data: {warning}" for warning in held_out.get("warnings", ())]
    return facts


def keep_counts(config: RunConfig, base: Path, prepared: Prepared, held_out: Prepared | None) -> None:
    """Keep what a run's preparation counted, so that whoever looks at this config later knows it at once."""
    from engine.data.stored_counts import store_counts
    from engine.facts.model_shape import model_facts

    limits = {"limits": list(counting_limits(config))}
    facts = of_both(facts_of(prepared) | limits, facts_of(held_out) | limits if held_out else None)
    store_counts(config, base, model_facts(config.model.name, config.model.revision), facts)


# What an epoch would be made of is not known where nothing is trained until something is mended.
_UNKNOWN = dict.fromkeys(("rows", "eval_rows", *_OF_ALL, "packing_efficiency"))


def _sampled(config: RunConfig, processing_class: Any, split: str, sample: int, *, streamed: bool) -> dict[str, Any]:
    use_template(config, processing_class)
    if streamed:
        plan = looked_at_plan(config, processing_class, tolerant=True)
    else:
        plan = plan_of(config, processing_class, split, tolerant=True)
    plan.count_all = True
    leave_out_duplicates(plan)
    order = plan.everything()
    if plan.val_set_size is not None and len(order) <= sample:
        hold_out(plan)
        order = plan.order()
    some = [order[place * len(order) // sample] for place in range(sample)] if len(order) > sample else order
    tokens, lengths, kept = Tokens(plan, processing_class), array("I"), array("I")
    counts = Counts(duplicates=_duplicates(plan))
    shape = shape_of(plan.method)
    for row in token_rows(plan, tokens, some, counts):
        lengths.append(row["length"])
        if not row.get("rejected_for"):
            kept.append(shape.length(row))
    facts = _facts(plan, counts, lengths)
    if not kept or len(kept) < len(lengths) or (counts.bad and plan.on_bad_row == "error"):
        return {
            **facts,
            **_UNKNOWN,
            "total": None if streamed else len(order) * counts.read // len(some),
            "exact": len(some) == len(order) and not streamed,
        }
    if plan.packing:
        facts["packing_efficiency"] = sum(kept) / (len(best_fit(list(kept), plan.max_length)) * plan.max_length)
    if streamed:
        # How many others there are, nobody knows.
        unknown = dict.fromkeys(("rows", *_OF_ALL))
        return {**facts, **unknown, "exact": False, "warnings": [streamed_note(len(some))]}
    if len(some) == len(order):
        return facts
    # Rows and tokens are those of all rows, if the others are like these.
    scale = len(order) / len(some) * _side(plan)
    rows = "rows" if plan.split == "train" else "eval_rows"
    grown = {name: round(facts[name] * scale) for name in (rows, *_OF_ALL)}
    return {**facts, **grown, "total": len(order) * counts.read // len(some), "exact": False}


def _duplicates(plan: Plan) -> int:
    """Rows left out as equal ones; those of rows from which some are held out are told of once."""
    return 0 if plan.val_set_size is not None and plan.split == "eval" else len(plan.duplicates or ())


def _side(plan: Plan) -> float:
    """The share of the sources' rows that the plan's split takes."""
    if plan.val_set_size is None:
        return 1.0
    rows = sum(source.count() for source in plan.sources)
    held = held_out_of(plan.val_set_size, rows) / rows
    return held if plan.split == "eval" else 1 - held


def streamed_note(looked: int) -> str:
    """What is said of rows of a stream that were looked at."""
    return f"the rows are streamed: {looked:,} of them are looked at here, the others when training comes to them"


@contextlib.contextmanager
def _seldom_collected() -> Iterator[None]:
    """Rows are many small lists without cycles: looking for garbage among them takes a fifth of the time of making them."""
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], UNCOLLECTED) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


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


# -- length and what is left to learn ----------------------------------------------------------------------------------
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


# -- building ----------------------------------------------------------------------------------------------------------
def _build(plan: Plan, processing_class: Any, folder: Path, progress: Progress) -> None:
    tokens, counts = Tokens(plan, processing_class), Counts()
    order = plan.order()
    counts.duplicates = _duplicates(plan)
    lengths = array("I")
    fixed: list[Row] = []
    hashes = RowHashes()
    too_long: list[int] = []
    images: dict[str, list[int]] = {}
    shape = shape_of(plan.method)
    columns = shape.columns
    packed = plan.packing
    with ArrowFile(folder / ("rows.arrow" if packed else "data.arrow"), shape.types) as file:
        for row in token_rows(plan, tokens, order, counts):
            lengths.append(row["length"])
            if row.get("rejected_for"):
                too_long.append(row["row"])
            else:
                kept = {name: row[name] for name in (*columns, "row", "images") if name in row}
                if len(fixed) < FIXED_ROWS:
                    fixed.append({name: row[name] for name in (*columns, "row")})
                for image in row.get("images") or ():
                    if image not in images and (stamp := stamp_image(image)) is not None:
                        images[image] = stamp
                hashes.add(row["row"], kept)
                file.add(kept)
            if len(lengths) % BATCH == 0:
                plan.refuse_changed()
                progress("tokenizing", counts.read, len(order))
    progress("tokenizing", counts.read, len(order))
    try:
        _refuse(plan, counts, too_long)
    except DataError as problem:
        told = bool(too_long or (counts.bad and plan.on_bad_row == "error") or counts.masked >= counts.read)
        raise Refused(problem, _facts(plan, counts, lengths), counted=told) from None
    counts.notes = [*sorted(tokens.notes), *_kept_together(plan, len(order))]
    if packed:
        counts.packs = _pack(folder, plan, progress)
    meta = {
        "counts": asdict(counts),
        "facts": _facts(plan, counts, lengths),
        "fingerprint": fingerprint(fixed),
        "fixed": fixed,
        "hashes": hashes.as_json(),
        "warnings": counts.sentences(),
        "about": about(plan, processing_class),
    }
    if images:
        (folder / IMAGES).write_text(json.dumps(images), "utf-8")
    (folder / "meta.json").write_text(json.dumps(meta), "utf-8")


def _refuse(plan: Plan, counts: Counts, too_long: list[int]) -> None:
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


def _kept_together(plan: Plan, held: int) -> list[str]:
    """That fewer rows than asked for are held out, where no group of rows with one prompt fits into the rest."""
    if plan.split != "eval" or plan.val_set_size is None:
        return []
    rows = sum(source.count() for source in plan.sources) - len(plan.duplicates or ())
    wanted = held_out_of(plan.val_set_size, rows)
    if held >= wanted:
        return []
    return [
        f"data.val_set_size: {held:,} rows are held out instead of {wanted:,}, as rows with one prompt stay together"
    ]


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
    number, index = _found(plan, row)
    # A row that is named by the byte where it begins has no number that says anything.
    named = "the row" if plan.bases and plan.bases[0] else f"row {index:,}"
    return plan.sources[number].rows.error(
        index,
        f"{named} is longer than data.max_length {plan.max_length} ({how})",
        "Set data.excess_length to drop or truncate, or raise data.max_length.",
    )


def _facts(plan: Plan, counts: Counts, lengths: array[int]) -> dict[str, Any]:
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


def _pack(folder: Path, plan: Plan, progress: Progress) -> int:
    """Rewrite the rows as packs; a pack names its source rows in `rows` and its documents' lengths in `seq_lengths`."""
    source = _arrow(folder / "rows.arrow")
    lengths = _sizes(source)
    packs = best_fit(lengths, plan.max_length)
    with ArrowFile(folder / "data.arrow") as file:
        for number, pack in enumerate(packs):
            file.add(joined(plan, [source[index] for index in pack]))
            if number % BATCH == 0:
                progress("packing", number, len(packs))
    progress("packing", len(packs), len(packs))
    (folder / "rows.arrow").unlink()
    return len(packs)


def joined(plan: Plan, rows: Sequence[Row]) -> Row:
    """Rows as one pack."""
    packed: Row = {
        "input_ids": [token for row in rows for token in row["input_ids"]],
        "labels": [label for row in rows for label in row["labels"]],
        "rows": [row["row"] for row in rows],
    }
    documents = [len(row["input_ids"]) for row in rows]
    # Without the setting packs are one stream: positions run through and tokens see the documents before.
    return packed | ({"seq_lengths": documents} if plan.separate else {"documents": documents})


def _sizes(dataset: Any) -> list[int]:
    import pyarrow.compute as compute

    return compute.list_value_length(dataset.data.column("input_ids")).to_pylist()


def fingerprint(fixed: Sequence[Row]) -> str:
    """A hash of ids and labels of the fixed rows: it changes when the same config would train other tokens."""
    digest = hashlib.sha256()
    for row in fixed:
        digest.update(json.dumps({name: row[name] for name in sorted(row) if name != "row"}).encode())
    return digest.hexdigest()[:16]


class ArrowFile:
    """Rows appended to an Arrow stream that `datasets` maps without copying. Types are fixed by our own columns."""

    def __init__(self, path: Path, types: Mapping[str, str] | None = None) -> None:
        """`types` names the Arrow types of columns that are not lists of token ids."""
        self._path, self._types = path, types or {}
        self._rows: list[Row] = []
        self._writer: Any = None
        self._schema: Any = None

    def __enter__(self) -> ArrowFile:
        self._file = self._path.open("wb")
        return self

    def __exit__(self, kind: Any, problem: Any, trace: Any) -> None:
        try:
            if kind is None:
                self._flush()
                if self._writer is not None:
                    self._writer.close()
        finally:
            self._file.close()

    def add(self, row: Row) -> None:
        self._rows.append(row)
        if len(self._rows) >= BATCH:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as arrow

        if not self._rows:
            return
        if self._writer is None:
            kinds = {"row": arrow.int64(), "images": arrow.list_(arrow.string()), "rows": arrow.list_(arrow.int64())}
            own = {"floats": arrow.list_(arrow.float32())}
            kinds |= {name: own.get(kind) or getattr(arrow, kind)() for name, kind in self._types.items()}
            names = list(dict.fromkeys(name for row in self._rows for name in row))
            self._schema = arrow.schema([(name, kinds.get(name, arrow.list_(arrow.int32()))) for name in names])
            self._writer = arrow.ipc.new_stream(self._file, self._schema)
        columns = {name: [row.get(name) for row in self._rows] for name in self._schema.names}
        self._writer.write_table(arrow.table(columns, schema=self._schema))
        self._rows.clear()


def _arrow(path: Path) -> Any:
    from datasets import Dataset

    return Dataset.from_file(str(path))


def _open(folder: Path, plan: Plan, *, cached: bool) -> Prepared:
    held = Held(folder)
    meta = json.loads((folder / "meta.json").read_text("utf-8"))
    return Prepared(
        _arrow(folder / "data.arrow"),
        DataFacts.counted_from(meta["facts"]),
        meta["fingerprint"],
        meta["counts"],
        tuple(meta["warnings"]),
        cached,
        meta["fixed"],
        folder,
        RowHashes.from_json(meta["hashes"]),
        tuple(source.path for source in plan.sources),
        held=held,
    )
