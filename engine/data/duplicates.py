"""Which rows `data.deduplicate` leaves out: those that say exactly what an earlier row of the same split says.

What a row says is its example, before template and tokenizer: messages, tools, answers, verdicts, images. Columns that the
method does not read make no difference. The first of equal rows stays, and a source's weight still repeats it. What was
found is kept beside the prepared rows, so that preview, counts and training read the sources once.
"""

from __future__ import annotations

import hashlib
import json

from engine.data.cache import stored_choice
from engine.data.cache_entries import Progress
from engine.data.plan import Plan
from engine.errors import WorkbenchError

FORMAT = 1  # grows when other rows of an unchanged config would be left out


def leave_out_duplicates(plan: Plan, progress: Progress | None = None) -> None:
    """Sets `plan.duplicates` where the config asks for it."""
    if plan.deduplicate is None or plan.duplicates is not None:
        return
    parts = {"duplicates": FORMAT, "method": plan.method}
    pairs = stored_choice(plan, "duplicates", parts, _find_duplicates, progress)
    plan.duplicates = {(number, index): first for number, index, first in pairs}


def left_out(plan: Plan) -> int:
    """How many rows are left out as equal ones; those of rows from which some are held out are told of once."""
    return 0 if plan.val_set_size is not None and plan.split == "eval" else len(plan.duplicates or ())


def _find_duplicates(plan: Plan, progress: Progress) -> list[tuple[int, int, int]]:
    """(source, row, number of the earlier row over all sources) of each that says nothing new."""
    places = sorted(set(plan.everything()))
    bases = [plan.base(number) for number in range(len(plan.sources))]
    first: dict[bytes, int] = {}
    found = []
    for done, (number, index) in enumerate(places):
        if done % 1024 == 0:
            progress("looking for equal rows", done, len(places))
        try:
            example, row = plan.example(number, index)
        except WorkbenchError:
            continue  # a row that cannot be read is told of where rows are prepared
        said = [{**vars(example), "template": None}, row if plan.reads_columns else None]
        digest = hashlib.blake2b(json.dumps(said, sort_keys=True, default=repr).encode(), digest_size=16).digest()
        earlier = first.setdefault(digest, bases[number] + index)
        if earlier != bases[number] + index:
            found.append((number, index, earlier))
    return found
