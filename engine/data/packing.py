"""Packs of several rows: which rows share one, and what it holds.

Best-fit decreasing, so packs are nearly full, and the same for the same lengths.

Documents are taken from the longest down; each goes into the fullest pack that still has room (the newest of equals).
Packs are kept by their free room, of which there are at most `capacity` sizes, so a million documents take seconds.
No document is cut.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from engine.data.prepared_rows import Row


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Packs as lists of document indices. Each document is in one pack; a pack's sum is at most `capacity`.

    Raises `ValueError` when a document is longer than a pack.
    """
    order = sorted(
        range(len(lengths)), key=lengths.__getitem__, reverse=True
    )  # stable: of equals the first comes first
    if order and lengths[order[0]] > capacity:
        raise ValueError(f"document {order[0]} has {lengths[order[0]]} tokens and a pack holds {capacity}")
    packs: list[list[int]] = []
    free: list[int] = []  # distinct free sizes, ascending
    by_free: dict[int, list[int]] = {}  # packs with that much room, newest last
    for index in order:
        need = lengths[index]
        spot = bisect_left(free, need)
        if spot < len(free):
            room = free[spot]
            pack = by_free[room].pop()
            if not by_free[room]:
                del by_free[room]
                free.pop(spot)
            packs[pack].append(index)
        else:
            room, pack = capacity, len(packs)
            packs.append([index])
        left = room - need
        if left:
            if left not in by_free:
                insort(free, left)
                by_free[left] = []
            by_free[left].append(pack)
    return packs


def joined(rows: Sequence[Row], *, separate: bool) -> Row:
    """Rows as one pack, which names its source rows in `rows`. Documents that are `separate` have their lengths in
    `seq_lengths`; without it a pack is one stream: positions run through and tokens see the documents before."""
    documents = [len(row["input_ids"]) for row in rows]
    return {
        "input_ids": [token for row in rows for token in row["input_ids"]],
        "labels": [label for row in rows for label in row["labels"]],
        "rows": [row["row"] for row in rows],
        "seq_lengths" if separate else "documents": documents,
    }
