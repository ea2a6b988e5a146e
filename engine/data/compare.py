"""What today's prepared rows teach otherwise than those a run was trained on, by row and token by token.

Both sides are prepared rows: the run's record has a hash of each and the fixed ones whole, the others lie in the cache as
long as nobody clears it. The worker holds a resumed run to its record before the model is loaded; the inspector asks the
same question for whoever wants to know before.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import takewhile
from pathlib import Path
from typing import Any

from engine.data.prepare import Prepared
from engine.data.prepared_rows import Row
from engine.data.pretokenized import IGNORED
from engine.data.token_parts import token_texts
from engine.errors import WorkbenchError, visible
from engine.run import checkpoint, data_record
from engine.run.data_record import DataChanged, RowHashes, SplitRecord, files_of
from engine.run.store import RunFolder

NAMED = 5
TOKENS_NAMED = 3
LISTED = 1000
_KEY = re.compile(r"[0-9a-f]{32}")
Token = tuple[int, bool]


@dataclass
class Difference:
    """One split beside its record: numbers of rows that teach otherwise, that are new, that are gone."""

    split: str
    before: int
    now: int
    changed: list[int] = field(default_factory=list)
    added: list[int] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)
    elsewhere: bool = False
    """Whether the rows that are not hashed one by one differ, or rows differ in their order alone."""
    streamed: bool = False
    """Whether its rows are streamed, of which the first are compared, and the files."""
    tokens: list[str] = field(default_factory=list)
    """Where the first of the changed rows differ, in words."""

    def __bool__(self) -> bool:
        return bool(self.changed or self.added or self.removed or self.elsewhere)

    @property
    def sentence(self) -> str:
        """What is other than the run was trained on, without a full stop."""
        if self.streamed:
            what = "files" if not (self.changed or self.added or self.removed) else "rows, from the first ones on,"
            return f"data.{self.split}: the {what} that are streamed are not those that the run was trained on"
        parts = []
        if self.changed:
            parts.append(
                f"{_rows(self.changed)} of {self.before:,} {'differs' if len(self.changed) == 1 else 'differ'} from what the run was trained on"
            )
        if self.added:
            parts.append(f"{_rows(self.added)} {'is' if len(self.added) == 1 else 'are'} new")
        if self.removed:
            parts.append(f"{_rows(self.removed)} {'is' if len(self.removed) == 1 else 'are'} gone")
        if self.elsewhere and not parts:
            parts.append("the rows differ from what the run was trained on, or come in another order")
        return f"data.{self.split}: " + "; ".join([*parts, *self.tokens])

    def as_json(self) -> dict[str, Any]:
        """Plain JSON, at most `LISTED` numbers of each sort."""
        found: dict[str, Any] = {"before": self.before, "now": self.now, "same": not self, "elsewhere": self.elsewhere}
        for name in ("changed", "added", "removed"):
            rows = getattr(self, name)
            found |= {name: rows[:LISTED], f"{name}_count": len(rows)}
        return found | {"sentence": self.sentence if self else ""}


def _rows(numbers: Sequence[int]) -> str:
    """`row 4`, `3 rows (4, 17, 30)`, `900 rows (0, 1, 2, 3, 4, ...)`."""
    if len(numbers) == 1:
        return f"row {numbers[0]:,}"
    more = ", ..." if len(numbers) > NAMED else ""
    return f"{len(numbers):,} rows ({', '.join(map(str, numbers[:NAMED]))}{more})"


# -- the run held to its record ----------------------------------------------------------------------------------------
def compare_with_record(
    run: RunFolder, now: Mapping[str, Prepared | None], tokenizer: Any, *, accepted: bool
) -> list[str]:
    """Compare the prepared rows of each split with the run's record, then record them; sentences on what differs.

    Raises DataChanged where something does, and `accepted` does not say to go on all the same.
    """
    splits = {split: prepared for split, prepared in now.items() if prepared is not None}
    said = [found.sentence for found in differences(run, splits, tokenizer, tolerant=accepted) if found]
    if said and not accepted:
        raise DataChanged(run, said)
    data_record.write(run, {split: record_of(prepared) for split, prepared in splits.items()})
    return said


def record_of(prepared: Prepared) -> SplitRecord:
    """The record of one split as it is now."""
    sources = list(prepared.sources)
    return SplitRecord(
        prepared.fingerprint, prepared.folder.name, prepared.hashes, prepared.fixed, sources, files_of(sources)
    )


def differences(
    run: RunFolder, now: Mapping[str, Prepared], tokenizer: Any, *, tolerant: bool = False
) -> list[Difference]:
    """Each split beside the run's record, those alike too; nothing for a run that has no checkpoint to go on from.

    A run without a record is held to the hash of its first rows that its checkpoints carry. With `tolerant` a damaged
    record counts as none. Raises WorkbenchError for one otherwise.
    """
    newest, _ = checkpoint.newest_valid(run, hashes=False)
    if newest is None:
        return []
    try:
        record = data_record.read(run)
    except data_record.RecordDamaged:
        if not tolerant:
            raise
        return []
    if record is None:
        return _by_checkpoint(newest, now)
    return beside(record, now, tokenizer)


def beside(record: Mapping[str, SplitRecord], now: Mapping[str, Prepared], tokenizer: Any) -> list[Difference]:
    """Each split of either side."""
    found = []
    for split, prepared in now.items():
        if split in record:
            difference = _compared(split, record[split].hashes, prepared.hashes)
            if prepared.stream is not None:
                difference.streamed = True
                difference.elsewhere = record[split].files != files_of(list(prepared.sources))
            else:
                difference.tokens = _first_tokens(record[split], prepared, difference.changed[:TOKENS_NAMED], tokenizer)
            found.append(difference)
        else:
            found.append(Difference(split, 0, len(prepared.hashes.numbers), added=sorted(prepared.hashes.by_number())))
    for split in record:
        if split not in now:
            numbers = record[split].hashes.by_number()
            found.append(Difference(split, len(numbers), 0, removed=sorted(numbers)))
    return found


def _by_checkpoint(newest: Path, now: Mapping[str, Prepared]) -> list[Difference]:
    commit = checkpoint.read_commit(newest)
    before = (commit or {}).get("fingerprint")
    if not isinstance(before, str) or not before or "train" not in now:
        return []
    count = len(now["train"].hashes.by_number())
    return [Difference("train", count, count, elsewhere=before != now["train"].fingerprint)]


def _compared(split: str, before: RowHashes, now: RowHashes) -> Difference:
    old, new = before.by_number(), now.by_number()
    found = Difference(
        split,
        len(old),
        len(new),
        changed=sorted(number for number, hashes in new.items() if old.get(number, hashes) != hashes),
        added=sorted(new.keys() - old.keys()),
        removed=sorted(old.keys() - new.keys()),
    )
    found.elsewhere = before.rest != now.rest or before.numbers != now.numbers
    return found


def against(
    run: RunFolder, now: Mapping[str, Prepared], tokenizer: Any, split: str, numbers: Sequence[int] | None, count: int
) -> dict[str, Any]:
    """All splits beside the record of a run as plain JSON, and rows of one of them token by token: those of `numbers`, or
    the first `count` that differ. Raises WorkbenchError for a run without a record."""
    record = data_record.read(run)
    if record is None:
        raise WorkbenchError(
            f"run {run.id} keeps no record of the rows it was trained on.",
            "It ended before its first step, or was made before records were kept; there is nothing to compare with.",
        )
    found = beside(record, now, tokenizer)
    result: dict[str, Any] = {"run": run.id, "splits": {each.split: each.as_json() for each in found}, "rows": []}
    chosen = next((each for each in found if each.split == split), None)
    if split in now and chosen is not None:
        if numbers is None:
            numbers = sorted([*chosen.changed, *chosen.added, *chosen.removed])[:count]
        result["rows"] = token_rows_of(record.get(split), now[split], numbers, tokenizer)
    return result


# -- token by token ----------------------------------------------------------------------------------------------------
def _first_tokens(record: SplitRecord, prepared: Prepared, numbers: Sequence[int], tokenizer: Any) -> list[str]:
    """`row 4 at token 12 of input: ' 3' was ' 2'`, for rows of which both sides are known."""
    said = []
    for row in token_rows_of(record, prepared, numbers, tokenizer):
        for name, items in row["parts"].items():
            place = next((place for place, item in enumerate(items) if item["op"] != "same"), None)
            if place is None:
                continue
            changes = list(takewhile(lambda item: item["op"] != "same", items[place : place + 40]))
            text = {
                op: "".join(item["text"] for item in changes if item["op"] == op)[:30] for op in ("removed", "added")
            }
            words = f"{visible(text['removed'])!r} became {visible(text['added'])!r}"
            if text["removed"] == text["added"]:
                words = f"{visible(text['added'])!r} is {'' if changes[-1]['trained'] else 'not '}learned now"
            said.append(f"row {row['index']:,} at token {place} of its {name}: {words}")
            break
        else:
            for name, (old, new) in row["values"].items():
                said.append(f"row {row['index']:,}: {name} {visible(str(old))[:40]} became {visible(str(new))[:40]}")
                break
    return said


def token_rows_of(
    record: SplitRecord | None, prepared: Prepared, numbers: Iterable[int], tokenizer: Any
) -> list[dict[str, Any]]:
    """The rows of these numbers with both sides: `parts` as tokens that are the same, removed or added; `values` that are
    no tokens as [before, now]; `known` is False where the row of before is not kept any more."""
    wanted = list(numbers)
    if not wanted:
        return []
    now = _stored(prepared.folder, wanted)
    before: dict[int, list[Row]] = {}
    if record is not None:
        if _KEY.fullmatch(record.prepared):
            before = _stored(prepared.folder.with_name(record.prepared), wanted)
        for row in record.fixed:
            before.setdefault(row["row"], [])
            if not any(row.items() <= known.items() for known in before[row["row"]]):
                before[row["row"]].append(row)
    found = []
    for number in wanted:
        old, new = before.get(number, []), now.get(number, [])
        known = bool(old) or record is None or number not in record.hashes.numbers
        found.append({"index": number, "known": known, **_both(old, new, tokenizer)})
    return found


def _both(old: list[Row], new: list[Row], tokenizer: Any) -> dict[str, Any]:
    """Both sides of one row; what was split into several goes one after the other."""
    names = list(dict.fromkeys(name for row in (*new, *old) for name in _parts(row)))
    parts = {}
    for name in names:
        before, now = ([token for row in rows for token in _parts(row).get(name, [])] for rows in (old, new))
        parts[name] = (
            _merged(before, now, tokenizer)
            if old
            else _items("added", now, token_texts(tokenizer, [each for each, _ in now]))
        )
    values: dict[str, list[Any]] = {}
    if old and new:
        for name in new[0]:
            if not name.endswith(("_ids", "labels", "row")) and old[0].get(name) != new[0][name]:
                values[name] = [old[0].get(name), new[0][name]]
    return {"parts": parts, "values": values}


def _parts(row: Row) -> dict[str, list[Token]]:
    """The row's lists of token ids, each with whether it is learned."""
    if "labels" in row:
        pairs = zip(row["input_ids"], row["labels"], strict=True)
        return {"input": [(each, label != IGNORED and place > 0) for place, (each, label) in enumerate(pairs)]}
    return {
        name.removesuffix("_ids"): [(each, name != "prompt_ids") for each in value]
        for name, value in row.items()
        if name.endswith("_ids") and isinstance(value, list)
    }


def _merged(old: list[Token], new: list[Token], tokenizer: Any) -> list[dict[str, Any]]:
    same = 0
    while same < min(len(old), len(new)) and old[same] == new[same]:
        same += 1
    tail = 0
    while tail < min(len(old), len(new)) - same and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    texts = [token_texts(tokenizer, [each for each, _ in side]) for side in (old, new)]
    items = _items("same", new[:same], texts[1][:same])
    middle = SequenceMatcher(None, old[same : len(old) - tail], new[same : len(new) - tail])
    for op, left, after_left, right, after_right in middle.get_opcodes():
        if op == "equal":
            span = slice(same + right, same + after_right)
            items += _items("same", new[span], texts[1][span])
            continue
        span = slice(same + left, same + after_left)
        items += _items("removed", old[span], texts[0][span])
        span = slice(same + right, same + after_right)
        items += _items("added", new[span], texts[1][span])
    return items + _items("same", new[len(new) - tail :], texts[1][len(new) - tail :])


def _items(op: str, tokens: Sequence[Token], texts: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {"op": op, "id": each, "text": text, "trained": trained}
        for (each, trained), text in zip(tokens, texts, strict=True)
    ]


def _stored(folder: Path, numbers: Sequence[int]) -> dict[int, list[Row]]:
    """Prepared rows by the number of the row they were made from; what is packed is taken out of its packs."""
    import pyarrow
    from datasets import Dataset

    path = folder / "data.arrow"
    if not path.is_file():
        return {}
    try:
        dataset = Dataset.from_file(str(path))
    except (OSError, ValueError, pyarrow.ArrowException):
        return {}
    wanted, found = set(numbers), dict[int, list[Row]]()
    packed = "rows" in dataset.column_names
    column = dataset.data.column("rows" if packed else "row").to_pylist()
    for place, held in enumerate(column):
        if packed and not wanted.isdisjoint(held):
            for row in _unpacked(dataset[place]):
                if row["row"] in wanted:
                    found.setdefault(row["row"], []).append(row)
        elif not packed and held in wanted:
            found.setdefault(held, []).append(dict(dataset[place]))
    return found


def _unpacked(pack: Row) -> Iterable[Row]:
    start = 0
    for number, length in zip(pack["rows"], pack.get("seq_lengths") or pack["documents"], strict=True):
        span = slice(start, start + length)
        yield {"row": number, "input_ids": pack["input_ids"][span], "labels": pack["labels"][span]}
        start += length
