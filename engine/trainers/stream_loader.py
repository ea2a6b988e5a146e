"""Batches of a stream, the same on one process and on several: what a trainer reads in the place of its loader.

The stream is one order of rows for all processes; each takes its part of the rows of a step, as it would of a data set. A
batch ends at the place that a checkpoint keeps, so nothing is read ahead that a resume would miss: where processes make
batches ahead, each carries the place behind it. Epochs follow one another without a border: the last batch of one may hold
the first rows of the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader, Dataset

from engine.trainers.uneven import WHOLE, Part, part_of

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Dealt:
    """How rows become batches: `batch_size` on a process, of prompts `copies` of each row, and every batch `times` times."""

    batch_size: int
    ranks: int = 1
    rank: int = 0
    copies: int = 1
    times: int = 1

    @property
    def rows(self) -> int:
        """Rows of the stream that all processes take together."""
        return self.batch_size * self.ranks // self.copies

    def part(self, rows: int) -> Part:
        """What this process's part of so many rows is."""
        if rows == self.rows:
            return WHOLE
        first, last = (place * rows // self.ranks for place in (self.rank, self.rank + 1))
        return part_of(last - first if rows >= self.ranks else int(self.rank < rows), rows, self.ranks)

    def mine(self, rows: Rows) -> Rows:
        """This process's part; of too few rows at the end a fair one, and where a process would have none, one of the others'."""
        if len(rows) == self.rows:
            spread = [row for row in rows for _ in range(self.copies)]
            return spread[self.rank * self.batch_size : (self.rank + 1) * self.batch_size]
        if len(rows) < self.ranks:
            return [rows[self.rank % len(rows)]]
        return rows[self.rank * len(rows) // self.ranks : (self.rank + 1) * len(rows) // self.ranks]


@dataclass(frozen=True)
class Place:
    """Where a stream stands once a batch is given: its state before and behind it, and what is over by then."""

    before: dict[str, Any]
    behind: dict[str, Any]
    epoch: float
    epochs_over: int
    over: bool
    part: Part = WHOLE


class _Rows(Dataset[Any]):
    """The data set of a loader whose sampler already gives rows."""

    def __getitem__(self, row: Any) -> Any:
        return row


class StreamLoader:
    """An iterable of batches on the device. Its state is the place behind the batch that was given last.

    With `workers` so many processes collate, each of them up to `prefetch` batches ahead of the one that is given.
    """

    def __init__(
        self, stream: Any, dealt: Dealt, collate: Any, device: Any, workers: int = 0, prefetch: int = 2
    ) -> None:
        self.dataset, self.dealt, self.collate_fn, self.device = stream, dealt, collate, device
        self._epochs_over = 0
        self.workers, self.prefetch = workers, prefetch
        self._given = 0
        """How often the batch behind the stream's place was given."""
        self._batch: Any = None
        self._place: Place | None = None
        """That of the batch that was given last; None before the first."""
        self._places = deque[Place]()
        """Those of the batches that are made ahead."""
        self._ahead: Iterator[Any] | None = None
        self.take: Callable[[Iterator[Any], None], Any] = next
        """How the next batch is asked for; what waits for it is counted there."""
        self._pinned = getattr(device, "type", "") == "cuda"

    @property
    def epoch(self) -> float:
        """Epochs that were given, in parts."""
        return float(self.dataset.epoch if self._place is None else self._place.epoch)

    def epoch_over(self) -> bool:
        """Whether an epoch has ended since this was asked; transformers tells of those of a data set."""
        before = self._epochs_over
        self._epochs_over = int(self.dataset.epochs_over if self._place is None else self._place.epochs_over)
        return self._epochs_over > before

    @property
    def part(self) -> Part:
        """This process's part of the batch that was given last."""
        return WHOLE if self._place is None else self._place.part

    @property
    def over(self) -> bool:
        """Whether every row of all epochs was given."""
        return bool(self.dataset.over if self._place is None else self._place.over)

    def state_dict(self) -> dict[str, Any]:
        """Epoch, shard and row, and how often the prompts behind them were given."""
        half = 0 < self._given < self.dealt.times
        place = self._place
        state = self.dataset.state() if place is None else place.before if half else place.behind
        return {**state, "given": self._given if half else 0, "epochs_over": self._epochs_over}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what was saved."""
        self._ahead, self._place = None, None
        self._places.clear()
        self.dataset.go_to(state)
        self._given, self._batch = int(state["given"]), None
        # Checkpoints of before do not say which epochs were told of.
        self._epochs_over = int(state.get("epochs_over", self.dataset.epochs_over))

    def __iter__(self) -> Iterator[Any]:
        while (batch := self.next_batch()) is not None:
            yield send_to_device(batch, self.device, non_blocking=self._pinned)

    def next_batch(self) -> Any:
        """The next batch on the host; None at the end of the stream."""
        if self._batch is None or self._given >= self.dealt.times:
            given = self._given if self._batch is None and self._given < self.dealt.times else 0
            if (batch := self.take(self._batches(), None)) is None:
                return None
            self._place = self._places.popleft()
            self._batch, self._given = self._on_host(batch), given
        self._given += 1
        return self._batch if self.dealt.times == 1 else list(self._batch)

    def _batches(self) -> Iterator[Any]:
        """The batches behind the stream's place, made here or ahead."""
        if self._ahead is None:
            if self.workers:
                self._ahead = iter(
                    DataLoader(
                        _Rows(),
                        batch_sampler=self._rows_of_batches(),
                        collate_fn=self.collate_fn,
                        num_workers=self.workers,
                        prefetch_factor=self.prefetch,
                        # Begun by a resume too, it takes no number of those that dropout draws.
                        generator=torch.Generator(),
                    )
                )
            else:
                self._ahead = map(self.collate_fn, self._rows_of_batches())
        return self._ahead

    def _rows_of_batches(self) -> Iterator[Rows]:
        """The rows of this process's batches; notes the place of each."""
        stream = self.dataset
        while True:
            before = stream.state()
            stream.batch += 1
            rows: Rows = []
            while len(rows) < self.dealt.rows and (row := stream.next_row()) is not None:
                rows.append(row)
            if not rows or (self.dealt.copies > 1 and len(rows) < self.dealt.rows):
                return
            part = self.dealt.part(len(rows))
            self._places.append(Place(before, stream.state(), stream.epoch, stream.epochs_over, stream.over, part))
            yield self.dealt.mine(rows)

    def _on_host(self, batch: Any) -> Any:
        if self._pinned and isinstance(batch, dict):
            batch = {
                # Patches of images that a loader process has left bytes can be pinned like tensors.
                name: each.pin_memory() if hasattr(each, "pin_memory") else each
                for name, each in batch.items()
            }
        return batch
