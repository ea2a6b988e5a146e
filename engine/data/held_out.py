"""Which rows `data.val_set_size` holds out of the training data: drawn by the seed, and never two sides of one prompt.

Rows belong together where they ask the same: the answers to one prompt, the pairs of one prompt, one text twice. A group is
held out whole or not at all, and the draw hangs on seed, prompts and size alone. Who is held out is kept beside the prepared
rows, so that preview, counts and training read the sources once.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from typing import Any

from engine.data.cache import stored_choice
from engine.data.cache_entries import Progress
from engine.data.duplicates import leave_out_duplicates
from engine.data.formats import read_example
from engine.data.parts import Example
from engine.data.plan import Plan
from engine.errors import DataError, WorkbenchError
from engine.facts.counts import held_out_of

FORMAT = 1  # grows when other rows of an unchanged config would be held out


def hold_out(plan: Plan, progress: Progress | None = None) -> None:
    """Sets `plan.held` where the plan's rows are one side of a split, once equal rows are left out. Raises `DataError`
    where nothing can be held out."""
    leave_out_duplicates(plan, progress)
    if plan.val_set_size is None or plan.held is not None:
        return
    parts: dict[str, Any] = {"held out": FORMAT, "size": plan.val_set_size, "seed": plan.seed}
    parts |= {"deduplicate": plan.deduplicate} if plan.deduplicate else {}
    held = stored_choice(plan, "held", parts, lambda plan, report: sorted(_drawn(plan, report)), progress)
    plan.held = frozenset((number, index) for number, index in held)


def _drawn(plan: Plan, progress: Progress) -> list[tuple[int, int]]:
    """(source, row) of those held out."""
    assert plan.val_set_size is not None
    places = sorted(set(plan.everything()))
    wanted = held_out_of(plan.val_set_size, len(places))
    setting = f"data.val_set_size: {plan.val_set_size:g}"
    if wanted >= len(places):
        raise DataError(f"{setting} leaves none of {len(places):,} rows to train on", "Hold out fewer.", path="")
    groups: dict[bytes, array[int]] = {}
    for done, (number, index) in enumerate(places):
        if done % 1024 == 0:
            progress("holding rows out", done, len(places))
        source = plan.sources[number]
        try:
            example = read_example(source.rows[index], source.detection.format or "", source.detection.columns)
        except WorkbenchError:
            continue  # a row that cannot be read is told of where rows are prepared
        groups.setdefault(_prompt_key(plan.seed, example), array("q")).append(done)
    held: list[tuple[int, int]] = []
    for group in sorted(groups):
        if len(held) + len(groups[group]) <= wanted:
            held += [places[place] for place in groups[group]]
    if not held:
        least = min(map(len, groups.values()), default=0)
        raise DataError(
            f"{setting} of {len(places):,} rows are {wanted:,}, and at least {least:,} rows with the same prompt belong "
            "together",
            "Hold out more, or name rows with other prompts under data.eval.",
            path="",
        )
    return held


def _prompt_key(seed: int, example: Example) -> bytes:
    """A number drawn by the seed for what the row asks: the same for all rows that belong together."""
    turns = example.messages or example.prompt
    if isinstance(turns, str):
        turns = [{"role": "user", "content": turns}] if turns.strip() else []
    first = next((place for place, turn in enumerate(turns) if turn["role"] == "assistant"), len(turns))
    prompt: list[Any] = [turn["content"] for turn in turns[:first] if turn["role"] != "system"]
    # Without a prompt a row is what it says.
    key = prompt or [turns, example.text, example.input_ids, example.chosen, example.rejected]
    text = json.dumps([seed, key, example.images], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).digest()[:16]
