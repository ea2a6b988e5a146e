"""The batch that training will see, token by token: read back from the real collator's tensors.

Rows are prepared by the same functions as for training and given to the same collator; ids, labels, masks and positions are
then read from its batch, padding taken off. A row that training leaves out is shown with the reason. With packing the
packs are those of the prepared data set, since which rows share a pack depends on all of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.config.tree import RunConfig
from engine.data.cache_entries import Progress
from engine.data.chat_masks import token_mask
from engine.data.collate import collator_for
from engine.data.column_map import brief
from engine.data.counting import SAMPLE, streamed_note
from engine.data.detect import CAREFUL
from engine.data.held_out import hold_out
from engine.data.image_references import short
from engine.data.plan import Plan, Source, nothing_named, plan_of, use_template
from engine.data.prepare import FIXED_ROWS, Prepared, fingerprint, prepare
from engine.data.prepared_rows import SHAPES, shape_of
from engine.data.prompts import reward_columns
from engine.data.row_counts import Counts
from engine.data.streaming.files import looked_at_plan
from engine.data.streaming.stream import open_stream
from engine.data.token_parts import learned, parts_of, token_texts, tokens_of, window_start
from engine.data.token_rows import fit as fit_row
from engine.data.token_rows import token_rows
from engine.data.tokens import Piece, Tokens
from engine.data.vision import ImageTokens, small_copy
from engine.errors import DataError, WorkbenchError

CLIP = 64 * 1024
LARGEST = CAREFUL
Row = dict[str, Any]


def preview(
    config: RunConfig,
    processing_class: Any,
    wanted: dict[str, Any] | None = None,
    count: int = 1,
    split: str = "train",
    on_progress: Progress | None = None,
    plan: Plan | None = None,
    places: list[tuple[int, int]] | None = None,
) -> dict[str, Any]:
    """`count` rows as training sees them. `wanted` is {"kind": index|random|worst|search, ...}; see `choose`.

    A caller that keeps data open passes its `plan` and the `places` already chosen from it.
    """
    wanted = wanted or {"kind": "index", "index": 0}
    use_template(config, processing_class)
    plan = plan or shown_plan(config, processing_class, split)
    hold_out(plan, on_progress)
    tokens, collate = Tokens(plan, processing_class), collator_for(config, processing_class)
    result: dict[str, Any] = {
        "method": plan.method,
        "rows": [],
        "fingerprint": "",
        "total": _total(plan),
        "sources": [_described(source) for source in plan.sources],
        "template": plan.template_name if plan.template and any(map(_in_turns, plan.sources)) else None,
        "warnings": [],
    }
    if plan.packing:
        if config.data.streaming and split == "train":
            prepared = open_stream(config, processing_class, first=False, look=SAMPLE)
            prepared = replace(prepared, warnings=(streamed_note(SAMPLE),))
        else:
            prepared = prepare(config, processing_class, split, on_progress)
        result |= {"total": len(prepared.dataset), "counts": prepared.counts, "warnings": list(prepared.warnings)}
        result["fingerprint"] = prepared.fingerprint
        result["rows"] = [_shown_pack(collate, tokens, prepared, index) for index in _packs(prepared, wanted, count)]
        return result
    chosen = places if places is not None else choose(processing_class, plan, wanted, count, on_progress)
    result["rows"] = [shown_row(plan, tokens, collate, number, index) for number, index in chosen]
    streamed = config.data.streaming and split == "train"
    notes = {streamed_note(sum(source.count() for source in plan.sources))} if streamed else set[str]()
    if plan.known is not None:
        result["fingerprint"], warnings = plan.known
        result["warnings"] = sorted({*warnings, *notes, *tokens.notes})
        return result
    fixed = _fixed(plan, tokens)
    result["fingerprint"] = fingerprint(fixed) if fixed else ""
    result["warnings"] = sorted(notes | tokens.notes)
    return result


def shown_plan(config: RunConfig, processing_class: Any, split: str) -> Plan:
    """The plan whose rows can be shown: of a stream those of a few shards."""
    if config.data.streaming and split == "train":
        return looked_at_plan(config, processing_class)
    return plan_of(config, processing_class, split)


# -- which rows --------------------------------------------------------------------------------------------------------
def choose(
    processing_class: Any,
    plan: Plan,
    wanted: dict[str, Any],
    count: int,
    on_progress: Progress | None,
) -> list[tuple[int, int]]:
    """(source, row) of what is asked: `index` from a number on; `random` with a seed; `worst` by longest, masked or
    truncated; `search` for text from a number on. Raises `DataError` for a number that is not there."""
    if not plan.sources:
        raise nothing_named(plan.split)
    kind = wanted.get("kind", "index")
    if kind == "random":
        return _random(plan, wanted.get("seed"), count)
    if kind == "worst":
        return _worst(plan, Tokens(plan, processing_class), str(wanted.get("by", "longest")), count, on_progress)
    if kind == "search":
        return _search(plan, str(wanted.get("text", "")), int(wanted.get("start", 0)), count, on_progress)
    first = int(wanted.get("index", 0))
    if (held := _held(plan)) is not None:
        found = [place for place in held if plan.base(place[0]) + place[1] >= first][:count]
        if not found:
            raise DataError(f"there is no held-out row from row {first} on; {len(held):,} rows are held out")
        return found
    found = [place for number in range(first, first + count) if (place := locate(plan, number)) is not None]
    if not found:
        total = sum(source.count() for source in plan.sources)
        raise DataError(f"there is no row {first}; the rows are 0 to {total - 1}")
    return found


def _held(plan: Plan) -> list[tuple[int, int]] | None:
    """The rows that can be shown of a plan whose sources' other rows are trained on; None where all can."""
    return plan.order() if plan.val_set_size is not None and plan.split == "eval" else None


def locate(plan: Plan, number: int) -> tuple[int, int] | None:
    """(source, row) of a row counted over all sources; waits only for the index up to that row."""
    for which, source in enumerate(plan.sources):
        if number < 0:
            return None
        limit = source.limit if source.limit is not None else 1 << 62
        if number < limit and (number < source.rows.known() or number < len(source.rows)):
            return which, number
        number -= source.count()
    return None


def _random(plan: Plan, seed: Any, count: int) -> list[tuple[int, int]]:
    """Rows at random among those indexed so far: no waiting for the end of a large file."""
    if (held := _held(plan)) is not None:
        return random.Random(seed).choices(held, k=count)
    known = [
        min(source.rows.known() or len(source.rows), source.limit if source.limit is not None else 1 << 62)
        for source in plan.sources
    ]
    draw = random.Random(seed)
    return [(which, draw.randrange(known[which])) for which in draw.choices(range(len(known)), known, k=count)]


def _worst(plan: Plan, tokens: Tokens, by: str, count: int, on_progress: Progress | None) -> list[tuple[int, int]]:
    """The rows with the most tokens, with nothing to learn, or with the most tokens cut."""
    if by not in ("longest", "masked", "truncated"):
        raise DataError(f"worst rows are by longest, masked or truncated; got {by}")
    found: list[tuple[float, int, int]] = []
    every = [(which, index) for which, source in enumerate(plan.sources) for index in range(source.count())]
    order = _held(plan) or every
    for done, (which, index) in enumerate(order):
        if on_progress is not None and done % 64 == 0:
            on_progress("looking for the worst rows", done, len(order))
        try:
            row = _prepared(plan, tokens, which, index)
        except WorkbenchError:
            continue
        length = row["length"]
        trained = row["trained"]
        score = {"longest": length, "masked": -trained, "truncated": length - plan.max_length}[by]
        if by == "longest" or (by == "masked" and trained == 0) or (by == "truncated" and score > 0):
            found.append((-score, which, index))
    found.sort()
    return [(which, index) for _, which, index in found[:count]]


def _search(plan: Plan, text: str, start: int, count: int, on_progress: Progress | None) -> list[tuple[int, int]]:
    """Rows whose text holds `text`, whatever the case, from row `start` on."""
    if not text:
        raise DataError("a search needs some text")
    needle, found = text.casefold(), []
    held = _held(plan)
    among = None if held is None else set(held)
    base = 0
    for which, source in enumerate(plan.sources):
        total = source.count()
        for index in range(max(start - base, 0), total):
            if on_progress is not None and index % 4096 == 0:
                on_progress("searching", base + index, base + total)
            if among is not None and (which, index) not in among:
                continue
            if needle in source.rows.text(index).casefold() or (
                not text.isascii() and needle in str(source.rows[index]).casefold()
            ):
                found.append((which, index))
                if len(found) == count:
                    return found
        base += total
    return found


def _packs(prepared: Prepared, wanted: dict[str, Any], count: int) -> Iterable[int]:
    total, kind = len(prepared.dataset), wanted.get("kind", "index")
    if kind == "random":
        return random.Random(wanted.get("seed")).choices(range(total), k=count)
    if kind != "index":
        raise DataError(
            f"packs can be shown by index or at random, not by {kind}", "Switch data.packing off to search."
        )
    first = int(wanted.get("index", 0))
    if not 0 <= first < total:
        raise DataError(f"there is no pack {first}; the packs are 0 to {total - 1}")
    return range(first, min(first + count, total))


# -- one row -----------------------------------------------------------------------------------------------------------
def shown_row(plan: Plan, tokens: Tokens, collate: Any, which: int, index: int) -> Row:
    """One row as JSON: parts, turns, what is cut, and why it is left out where it is."""
    source = plan.sources[which]
    number = plan.base(which) + index
    path, line = source.rows.place(index)
    shown: Row = {"index": number, "parts": {}, "truncated": False, "images": [], "path": path, "line": line}
    size = source.rows.size(index)
    if size > LARGEST:
        note = f"a row of {size / 1e6:,.0f} MB is not tokenized for the preview; its beginning is shown"
        return shown | {"error": note, "clipped": source.rows.text(index, CLIP)}
    try:
        row = _prepared(plan, tokens, which, index)
    except WorkbenchError as problem:
        return shown | {"error": problem.message, "clipped": source.rows.text(index, 2000)}
    shown |= {"length": row["length"], "truncated": bool(row.get("cut")), "images": _images(row, tokens.images)}
    shown |= {name: row[name] for name in ("left_out", "refused") if row[name]}
    shown["flaws"] = list(row["flaws"])
    if source.template is not None:
        shown["template"] = Path(source.template).name
    if not shape_of(plan.method).length(row):
        return shown
    for number, each in enumerate((row, *row["beside"]), 1):
        for name, part in parts_of(tokens.tokenizer, collate([each]), each).items():
            # Of several pairs each shows what the first has not; the number is the pair's.
            same = shown["parts"].get(name, part) == part
            shown["parts"][name if same else f"{name} {number}"] = part
    shown["turns"] = _turns(row, shown["parts"])
    if "prompt_ids" in row and "columns" in row:
        shown["rewards"] = {name: brief(value) for name, value in reward_columns(row).items() if name != "images"}
    return shown


# Why a row that was read is not trained, by what its preparation counted.
_REASONS = {
    "dropped": "it is longer than data.max_length",
    "masked": "nothing in it is learned",
    "identical": "its chosen and its rejected answer are the same",
}


def _prepared(plan: Plan, tokens: Tokens, which: int, index: int) -> Row:
    """The row after all that training does to it; `left_out` says why training would not use it, `refused` why it would end there."""
    source = plan.sources[which]
    try:
        example, given = plan.example(which, index)
        shape, tokens = shape_of(plan.method), tokens.of(example)
        if shape is SHAPES["language"]:
            rows = tokens.rows([tokens.piece(example)])
        else:
            rows = [shape.make(tokens, each, given) for each in shape.examples(example)]
        rows[0]["flaws"] = tokens.flaws(rows[0])
    except WorkbenchError as problem:
        if isinstance(problem, DataError) and problem.path:
            raise
        raise source.rows.error(index, f"row {index}: {problem.message}", problem.hint) from None
    counts = Counts()
    kept = [made for row in rows for made in fit_row(plan, row, counts)]
    row = (
        {**rows[0], **kept[0], "beside": kept[1:] if len(rows) > 1 else []} if kept else {**rows[0], "beside": rows[1:]}
    )
    row["left_out"] = row["refused"] = ""
    if plan.split == "train" and plan.held is not None and (which, index) in plan.held:
        row["left_out"] = "it is held out by data.val_set_size, to measure the loss on"
    elif (earlier := (plan.duplicates or {}).get((which, index))) is not None:
        row["left_out"] = f"it says exactly what row {earlier:,} says"
    elif row.get("rejected_for"):
        row["refused"] = f"{row['length']:,} tokens are more than data.max_length {plan.max_length}"
    elif not kept:
        row["left_out"] = next((words for name, words in _REASONS.items() if getattr(counts, name)), _REASONS["masked"])
    row["trained"] = 0 if shape.flaw(row) else shape.trained(row)
    return row


def _images(row: Row, images: ImageTokens | None) -> list[dict[str, Any]]:
    """Each image of the row: what it is called, its size, the size that the model sees and in how many tiles, its tokens
    from `start` to `end`, and a small copy of it."""
    piece, offsets = row.get("piece"), row.get("offsets")
    if images is None or not row.get("images"):
        return []
    spans = row.get("image_spans", [])
    if isinstance(piece, Piece) and offsets is not None:
        drawn = [[at for at, own in enumerate(token_mask(offsets, [place])) if own] for place in piece.places]
        spans = [(tokens[0], tokens[-1] + 1) for tokens in drawn]
    shown = []
    for reference, (start, end) in zip(row["images"], spans, strict=True):
        where = {"start": start, "end": end, "tokens": end - start}
        seen = images.resized(reference)
        size = {"resized": [seen.width, seen.height], "tiles": seen.tiles}
        shown.append({"name": short(reference), **where, **size, **small_copy(reference)})
    return shown


def _turns(row: Row, parts: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Turn borders in tokens of the part `input`: role, first token, token after the last."""
    piece, offsets = row.get("piece"), row.get("offsets")
    if not isinstance(piece, Piece) or not piece.turns or offsets is None:
        return []
    shift, size = window_start(row, len(offsets)), len(parts["input"])
    turns = []
    for turn in piece.turns:
        inside = [place for place, (start, end) in enumerate(offsets) if turn.start < end and start < turn.end]
        if inside:
            first, after = inside[0] - shift, inside[-1] + 1 - shift
            if first < size and after > 0:
                turns.append({"role": turn.role, "start": max(first, 0), "end": min(after, size)})
    return turns


def _shown_pack(collate: Any, tokens: Tokens, prepared: Prepared, index: int) -> Row:
    row = prepared.dataset[index]
    batch = collate([row])
    ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
    items = tokens_of(ids, token_texts(tokens.tokenizer, ids), learned(labels))
    lengths = row.get("seq_lengths") or row.get("documents") or [len(ids)]
    positions = batch["position_ids"][0].tolist() if "position_ids" in batch else list(range(len(ids)))
    return {
        "index": index,
        "parts": {"input": items},
        "truncated": False,
        "images": [],
        "length": len(ids),
        "documents": lengths,
        "separate": "position_ids" in batch,
        "positions": positions,
        "source_rows": row["rows"],
        "turns": [],
    }


# -- the rest ----------------------------------------------------------------------------------------------------------
def _fixed(plan: Plan, tokens: Tokens) -> list[Row]:
    """The rows whose hash is the fingerprint: the same ones that `prepare` takes."""
    names = (*shape_of(plan.method).columns, "row")
    fixed: list[Row] = []
    counts = Counts()
    pending: list[tuple[int, int]] = []

    def take() -> None:
        try:
            for row in token_rows(plan, tokens, pending, counts):
                if not row.get("rejected_for") and len(fixed) < FIXED_ROWS:
                    fixed.append({name: row[name] for name in names if name in row})
        except WorkbenchError:
            # The bad row itself is shown where it is asked for; a fingerprint needs whole rows only.
            pass
        pending.clear()

    for place in plan.beginning():
        if _too_large(plan, *place):
            # Tokenizing it would take minutes; `prepare` will, and give the fingerprint.
            return []
        pending.append(place)
        if len(pending) == FIXED_ROWS:
            try:
                take()
            except IndexError:
                break
            if len(fixed) >= FIXED_ROWS or counts.read > 8 * FIXED_ROWS:
                break
    if pending:
        take()
    return fixed


def _too_large(plan: Plan, which: int, index: int) -> bool:
    try:
        return plan.sources[which].rows.size(index) > LARGEST
    except IndexError:
        return False


def _total(plan: Plan) -> int | None:
    counts = [source.rows.length for source in plan.sources]
    limits = [source.limit for source in plan.sources]
    if any(count is None for count in counts):
        return None
    return sum(min(count or 0, limit or 1 << 62) for count, limit in zip(counts, limits, strict=True))


def _in_turns(source: Source) -> bool:
    """Whether the rows go through the chat template: plain texts, ids and the texts of an embedding do not."""
    return source.detection.format not in ("text", "tokens", "synthetic", "embedding")


def _described(source: Source) -> dict[str, Any]:
    detection = source.detection
    return {
        "path": source.path,
        "template": source.template,
        "format": detection.format,
        "columns": dict(detection.columns),
        "why": detection.why,
        "problems": list(detection.problems),
        "rows": source.rows.length,
        "indexed": source.rows.progress,
    }
