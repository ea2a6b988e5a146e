"""From a config and a processing class to the rows that are trained, counted, cached and memory-mapped.

Every row that is left out or cut is counted and the counts go with the result (`engine.data.row_counts`); rows that hold
nothing to learn are never trained on. Prepared rows are an Arrow file under a key of everything that changes tokens
(`engine.data.cache`), so an unchanged config starts at once.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.config.facts import DataFacts
from engine.config.tree import RunConfig
from engine.data.arrow_file import ArrowFile, open_rows, sizes_of
from engine.data.cache import IMAGES, Store, about, key_of
from engine.data.cache_entries import Held, Progress
from engine.data.duplicates import left_out
from engine.data.held_out import hold_out
from engine.data.image_references import stamp_image
from engine.data.packing import best_fit, joined
from engine.data.plan import Plan, nothing_named, plan_of, use_template
from engine.data.prepared_rows import BATCH, Row, shape_of
from engine.data.row_counts import Counts, Refused, facts_of_counts, refuse_useless
from engine.data.token_rows import token_rows
from engine.data.tokens import Tokens
from engine.errors import DataError
from engine.facts.counts import held_out_of
from engine.run.data_record import RowHashes

FIXED_ROWS = 16
UNCOLLECTED = 200_000
"""Objects that are made before garbage is looked for while rows are prepared."""


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
        raise nothing_named(split)
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


def _open(folder: Path, plan: Plan, *, cached: bool) -> Prepared:
    held = Held(folder)
    meta = json.loads((folder / "meta.json").read_text("utf-8"))
    return Prepared(
        open_rows(folder / "data.arrow"),
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


@contextlib.contextmanager
def _seldom_collected() -> Iterator[None]:
    """Rows are many small lists without cycles: looking for garbage among them takes a fifth of the time of making them."""
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], UNCOLLECTED) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _build(plan: Plan, processing_class: Any, folder: Path, progress: Progress) -> None:
    tokens, counts = Tokens(plan, processing_class), Counts()
    order = plan.order()
    counts.duplicates = left_out(plan)
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
        refuse_useless(plan, counts, too_long)
    except DataError as problem:
        told = bool(too_long or (counts.bad and plan.on_bad_row == "error") or counts.masked >= counts.read)
        raise Refused(problem, facts_of_counts(plan, counts, lengths), counted=told) from None
    counts.notes = [*sorted(tokens.notes), *_kept_together(plan, len(order))]
    if packed:
        counts.packs = _pack(folder, plan, progress)
    meta = {
        "counts": asdict(counts),
        "facts": facts_of_counts(plan, counts, lengths),
        "fingerprint": fingerprint(fixed),
        "fixed": fixed,
        "hashes": hashes.as_json(),
        "warnings": counts.sentences(),
        "about": about(plan, processing_class),
    }
    if images:
        (folder / IMAGES).write_text(json.dumps(images), "utf-8")
    (folder / "meta.json").write_text(json.dumps(meta), "utf-8")


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


def _pack(folder: Path, plan: Plan, progress: Progress) -> int:
    """Rewrite the rows as packs; how many those are."""
    source = open_rows(folder / "rows.arrow")
    lengths = sizes_of(source)
    packs = best_fit(lengths, plan.max_length)
    with ArrowFile(folder / "data.arrow") as file:
        for number, pack in enumerate(packs):
            file.add(joined([source[index] for index in pack], separate=plan.separate))
            if number % BATCH == 0:
                progress("packing", number, len(packs))
    progress("packing", len(packs), len(packs))
    (folder / "rows.arrow").unlink()
    return len(packs)


def fingerprint(fixed: Sequence[Row]) -> str:
    """A hash of ids and labels of the fixed rows: it changes when the same config would train other tokens."""
    digest = hashlib.sha256()
    for row in fixed:
        digest.update(json.dumps({name: row[name] for name in sorted(row) if name != "row"}).encode())
    return digest.hexdigest()[:16]
