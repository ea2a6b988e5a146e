"""Batches of a stream, the same on one process and on several: what a trainer reads in the place of its loader.

The stream is one order of rows for all processes; each takes its part of the rows of a step, as it would of a data set. A
batch ends at the place that a checkpoint keeps, so nothing is read ahead that a resume would miss. Epochs follow one another
without a border: the last batch of one may hold the first rows of the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import send_to_device

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Dealt:
    """How rows become batches: `each` on a process, of prompts `copies` of each row, and every batch `times` times."""

    each: int
    ranks: int = 1
    rank: int = 0
    copies: int = 1
    times: int = 1

    @property
    def rows(self) -> int:
        """Rows of the stream that all processes take together."""
        return self.each * self.ranks // self.copies

    def mine(self, rows: Rows) -> Rows:
        """This process's part; of too few rows at the end a fair one, and where a process would have none, one of the others'."""
        if len(rows) == self.rows:
            spread = [row for row in rows for _ in range(self.copies)]
            return spread[self.rank * self.each : (self.rank + 1) * self.each]
        if len(rows) < self.ranks:
            return [rows[self.rank % len(rows)]]
        return rows[self.rank * len(rows) // self.ranks : (self.rank + 1) * len(rows) // self.ranks]


class StreamLoader:
    """An iterable of batches on the device. Its state is the place behind the batch that was given last."""

    def __init__(self, stream: Any, dealt: Dealt, collate: Any, device: Any) -> None:
        self.dataset, self.dealt, self.collate_fn, self.device = stream, dealt, collate, device
        self._epochs_over = 0
        self._given = 0
        """How often the batch behind the stream's place was given."""
        self._batch: Any = None
        self._before: dict[str, Any] = {}
        self._pinned = getattr(device, "type", "") == "cuda"

    def state_dict(self) -> dict[str, Any]:
        """Epoch, shard and row, and how often the prompts behind them were given."""
        half = 0 < self._given < self.dealt.times
        return {**(self._before if half else self.dataset.state()), "given": self._given if half else 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what was saved."""
        self.dataset.go_to(state)
        self._given, self._batch = int(state["given"]), None

    def epoch_over(self) -> bool:
        """Whether an epoch has ended since this was asked; transformers tells of those of a data set."""
        before, self._epochs_over = self._epochs_over, self.dataset.epochs_over
        return bool(self._epochs_over > before)

    def __iter__(self) -> Iterator[Any]:
        while (batch := self.next_batch()) is not None:
            yield send_to_device(batch, self.device)

    def next_batch(self) -> Any:
        """The next batch on the host; None at the end of the stream."""
        if self._batch is None or self._given >= self.dealt.times:
            given = self._given if self._batch is None and self._given < self.dealt.times else 0
            rows = self._rows()
            if not rows or (self.dealt.copies > 1 and len(rows) < self.dealt.rows):
                return None
            self._batch, self._given = self._collated(self.dealt.mine(rows)), given
        self._given += 1
        return self._batch if self.dealt.times == 1 else list(self._batch)

    def _rows(self) -> Rows:
        stream = self.dataset
        rows: Rows = []
        self._before = stream.state()
        stream.batch += 1
        while len(rows) < self.dealt.rows and (row := stream.next_row()) is not None:
            rows.append(row)
        return rows

    def _collated(self, rows: Rows) -> Any:
        batch = self.collate_fn(rows)
        if self._pinned and isinstance(batch, dict):
            batch = {
                name: each.pin_memory() if isinstance(each, torch.Tensor) else each for name, each in batch.items()
            }
        return batch
