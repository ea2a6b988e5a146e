"""What is known of a split's rows before training: counted over all of them, or over some that are spread over all.

Rows that hold nothing good are part of the answer, not an error: forms and `check` show what would be refused.
"""

from __future__ import annotations

from array import array
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.config.facts import counting_limits
from engine.config.tree import RunConfig
from engine.data.cache_entries import Progress
from engine.data.duplicates import leave_out_duplicates, left_out
from engine.data.held_out import hold_out
from engine.data.packing import best_fit
from engine.data.plan import Plan, plan_of, use_template
from engine.data.prepare import Prepared, prepare
from engine.data.prepared_rows import shape_of
from engine.data.row_counts import Counts, Refused, facts_of_counts
from engine.data.stored_counts import store_counts
from engine.data.streaming.files import looked_at_plan
from engine.data.token_rows import token_rows
from engine.data.tokens import Tokens
from engine.errors import Cancelled, WorkbenchError
from engine.facts.counts import held_out_of
from engine.facts.model_shape import model_facts

SAMPLE = 512
"""Rows that are looked at where not all are."""
_OF_ALL = ("tokens", "trained_tokens", "images", "all_image_tokens", "image_pixels")
# What an epoch would be made of is not known where nothing is trained until something is mended.
_UNKNOWN = dict.fromkeys(("rows", "eval_rows", *_OF_ALL, "packing_efficiency"))


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
    limits = {"limits": list(counting_limits(config))}
    facts = of_both(facts_of(prepared) | limits, facts_of(held_out) | limits if held_out else None)
    store_counts(config, base, model_facts(config.model.name, config.model.revision), facts)


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
    counts = Counts(duplicates=left_out(plan))
    shape = shape_of(plan.method)
    for row in token_rows(plan, tokens, some, counts):
        lengths.append(row["length"])
        if not row.get("rejected_for"):
            kept.append(shape.length(row))
    facts = facts_of_counts(plan, counts, lengths)
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
