"""The order in which a stream is read: shards of all its sources, mixed anew in each epoch, and a place in that order.

Which shard comes next is a function of the seed and of a few numbers that say how far each source has been read, so going
on anywhere costs nothing: no row before it is looked at again. Sources whose length is not known are drawn by a guess of
it, until their end is met.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np


@dataclass(frozen=True)
class Lane:
    """The files of one source that are read in one epoch. A source of weight 2.5 has three lanes, the last with a `share`
    of one half."""

    number: int
    files: tuple[int, ...]
    """Their numbers among all files of the stream."""
    counts: tuple[int | None, ...]
    """How many shards each has; None where only reading them tells."""
    units: tuple[Sequence[int] | None, ...]
    """Shards of a file that are read together, as `Cut.units` has them."""
    copy: int
    """How many lanes of the same source come before it."""
    share: float
    guess: int
    """About how many shards all files have together."""

    @cached_property
    def known(self) -> bool:
        """Whether it is known how many shards there are."""
        return None not in self.counts

    @cached_property
    def total(self) -> int:
        """How many shards are known."""
        return sum(count or 0 for count in self.counts)


class Pick(NamedTuple):
    """A shard of the epoch: which lane it is read for, and which shard of which file it is."""

    lane: int
    file: int
    shard: int


class Walk:
    """A place between two shards. `next` looks at the shard behind it, `pass_by` moves on."""

    def __init__(self, lanes: Sequence[Lane], seed: int, shuffle: bool) -> None:
        self.lanes, self.seed, self.shuffle = lanes, seed, shuffle
        self._orders: dict[int, tuple[Any, Any]] = {}
        self.begin(0)

    def begin(self, epoch: int) -> None:
        """Go to the beginning of an epoch."""
        self.epoch, self.shard = epoch, 0
        self.taken = [[0, 0] for _ in self.lanes]
        """Of each lane: shards that were taken, where they are known; else files that were read to the end, and shards of
        the one after them."""
        self._orders = {}

    def state(self) -> dict[str, Any]:
        """The place as plain numbers."""
        return {"epoch": self.epoch, "shard": self.shard, "taken": [list(each) for each in self.taken]}

    def go_to(self, state: dict[str, Any]) -> None:
        """Take up what `state` gave."""
        orders = self._orders if int(state["epoch"]) == self.epoch else {}
        self.begin(int(state["epoch"]))
        self._orders = orders
        self.shard = int(state["shard"])
        self.taken = [[int(number) for number in each] for each in state["taken"]]

    def copy(self) -> Walk:
        """Another walk at the same place."""
        other = Walk(self.lanes, self.seed, self.shuffle)
        other.go_to(self.state())
        other._orders = self._orders if other.epoch == self.epoch else {}
        return other

    def next(self) -> Pick | None:
        """The shard that comes next in this epoch; None at its end."""
        left = [self._left(lane) for lane in self.lanes]
        total = sum(left)
        if not total:
            return None
        place = 0
        if self.shuffle and len(left) > 1:
            place = _number(self.seed, self.epoch, self.shard) * total >> 64
        number = 0
        while place >= left[number]:
            place -= left[number]
            number += 1
        lane, (done, inside) = self.lanes[number], self.taken[number]
        files, shards = self._order(lane)
        return Pick(number, int(files[done]), int(shards[done]) if lane.known else inside)

    def pass_by(self, pick: Pick, last: bool) -> None:
        """Go behind the shard that `next` gave; `last` says that its file has no shard after it."""
        self.shard += 1
        taken = self.taken[pick.lane]
        if self.lanes[pick.lane].known:
            taken[0] += 1
        elif last:
            taken[:] = [taken[0] + 1, 0]
        else:
            taken[1] += 1

    def share(self) -> float:
        """About how much of the epoch lies before this place."""
        left = sum(self._left(lane) for lane in self.lanes)
        return self.shard / max(self.shard + left, 1)

    def _left(self, lane: Lane) -> int:
        done, inside = self.taken[lane.number]
        if lane.known:
            return lane.total - done
        if done >= len(lane.files):
            return 0
        return max(lane.guess * (len(lane.files) - done) // len(lane.files) - inside, 1)

    def _order(self, lane: Lane) -> tuple[Any, Any]:
        """Files and shards of a lane in the epoch's order; of files without a known length the files, with shard 0."""
        if lane.number not in self._orders:
            self._orders[lane.number] = self._ordered(lane)
        return self._orders[lane.number]

    def _ordered(self, lane: Lane) -> tuple[Any, Any]:
        counts = np.array([count or 0 for count in lane.counts] if lane.known else [1] * len(lane.files))
        files = np.repeat(np.array(lane.files), counts)
        shards = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
        if not self.shuffle:
            return files, shards
        sizes = [size for count, units in zip(counts, lane.units, strict=True) for size in units or [1] * count]
        draw = generator(self.seed, self.epoch, "lane", lane.number)
        # Groups in a mixed order, and within each its shards in a mixed order.
        ranks = np.repeat(draw.permutation(len(sizes)), sizes)
        order = np.lexsort((draw.permutation(len(ranks)), ranks))
        return files[order], shards[order]


def generator(*parts: Any) -> np.random.RandomState:
    """Random numbers that these parts alone decide, in every version of numpy."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=32).digest()
    return np.random.RandomState(np.frombuffer(digest, dtype="<u4"))


def _number(*parts: Any) -> int:
    """One number below 2 to the 64 that these parts decide."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest(), "little")
