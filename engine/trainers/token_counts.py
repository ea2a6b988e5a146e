"""Where a batch comes from and how many of its tokens are trained: from the collator into the counts that checkpoints keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import get_worker_info

from engine.errors import WorkbenchError
from engine.trainers.ranks import Ranks
from engine.trainers.uneven import WHOLE

ROWS = "rows"
UNREAD = 4096
"""Batches whose tokens wait to be counted at most, however seldom is logged."""


class Origin:
    """Which rows made a batch, and how many of its tokens there are and are trained: counted on the host, where a batch is
    made, since each count on a card is a kernel more a step. No list, since accelerate and transformers walk each number
    of one on its way to the device: a thousand calls a step for a batch of 64."""

    __slots__ = ("labelled", "part", "positions", "rows", "tokens", "trained")

    def __init__(self, rows: list[int], tokens: int, trained: int, labelled: int | None = None) -> None:
        """`labelled`: of labels [B, T] behind each row's first, those that are not ignored; None where there are no such."""
        self.rows, self.tokens, self.trained, self.labelled = rows, tokens, trained, labelled
        self.positions: torch.Tensor | None = None
        """Those of a batch of packs, as they were made on the host."""
        self.part = WHOLE

    def count_nothing(self) -> None:
        """It only fills in where other processes have rows left."""
        self.rows, self.tokens, self.trained = [], 0, 0


class WithRows:
    """A collator that also hands on where the batch comes from; `collator` is the preview's own object."""

    def __init__(self, collator: Any) -> None:
        self.collator = collator
        self.collate = self._collate
        self.part: Callable[[dict[str, Any]], dict[str, Any]] | None = None
        """What of a batch is this rank's, where several divide its rows."""

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        if get_worker_info() is None:
            return self.collate(rows)
        try:
            return self._collate(rows)
        except WorkbenchError as problem:
            # torch would word it anew, with the loader process's traceback: the step that needs the batch raises it.
            return {ROWS: problem, "labels": torch.zeros(1, 1, dtype=torch.long)}

    def _collate(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = self.collator(rows)
        batch = batch if self.part is None else self.part(batch)
        packed = bool(rows) and "rows" in rows[0]
        ids = [each for row in rows for each in row["rows"]] if packed else [row.get("row", -1) for row in rows]
        labels = batch.get("labels")
        behind = int(labels[:, 1:].ne(-100).sum()) if labels is not None and labels.dim() == 2 else None
        tokens, trained = (int(count) for count in counted(batch))
        origin = Origin(ids, tokens, trained, behind)
        origin.positions = batch.get("position_ids")
        batch[ROWS] = origin
        return batch


def take_origin(batch: dict[str, Any]) -> Origin | None:
    """Takes out of a batch where it comes from. Raises the error of a loader process that could not make it."""
    origin: Origin | WorkbenchError | None = batch.pop(ROWS, None)
    if isinstance(origin, WorkbenchError):
        raise origin
    return origin


def counted(batch: dict[str, Any]) -> tuple[Any, Any]:
    """How many tokens a batch has and how many of them are trained: tensors of one number on the batch's own device."""
    mask = batch.get("attention_mask")
    total = mask.sum() if mask is not None else torch.tensor(batch["input_ids"].numel())
    return total, batch["labels"].ne(-100).sum() if "labels" in batch else batch["completion_mask"].sum()


class TokenCounts:
    """Tokens seen and tokens trained so far, on all ranks together. Those that are counted on a device are read when they
    are logged, so that nothing waits for them."""

    def __init__(self, accelerator: Any, ranks: Ranks) -> None:
        self.total = self.trained = 0
        self._accelerator, self._ranks = accelerator, ranks
        # Asked once: accelerate looks its state up anew each time.
        self._processes: int = accelerator.num_processes
        self._unread: list[tuple[Any, Any]] = []
        self._asked: torch.Tensor | None = None
        """What all ranks told of their tokens, on its way to the host."""

    def add(self, total: Any, trained: Any) -> None:
        """Notes a batch's tokens: numbers, or tensors of one."""
        self._unread.append((total, trained))
        if len(self._unread) >= UNREAD:
            self.read()

    def ask(self) -> None:
        """Has all ranks tell what is not counted yet; `read`, which must come when that is on the host, asks them no more. On all
        ranks."""
        if self._processes > 1 and self._unread:
            self._asked = self._told_by_all().to("cpu", non_blocking=True, copy=True)
            self._unread.clear()

    def read(self) -> tuple[int, int]:
        """Both counts as they are now, or were when asked; on all ranks."""
        if self._asked is not None:
            table, self._asked = self._asked, None
            fresh = self._taken(table)
        elif self._unread:
            fresh = self._sums()
            self._unread.clear()
        else:
            return self.total, self.trained
        self.total += fresh[0]
        self.trained += fresh[1]
        return self.total, self.trained

    def _sums(self) -> tuple[int, int]:
        """Of what is not counted yet; from a device in one copy, on the host without a kernel."""
        on_host = isinstance(self._unread[0][0], int) or self._unread[0][1].device.type == "cpu"
        if self._processes > 1:
            return self._taken(self._told_by_all())
        if on_host:
            return sum(int(total) for total, _ in self._unread), sum(int(trained) for _, trained in self._unread)
        total, trained = self._own().tolist()
        return int(total), int(trained)

    def _own(self) -> torch.Tensor:
        """The tokens and trained tokens of this rank that are not counted yet [2], on its device."""
        counts = [torch.as_tensor(count, device=self._accelerator.device) for pair in self._unread for count in pair]
        return torch.stack(counts).view(-1, 2).sum(0)

    def _told_by_all(self) -> torch.Tensor:
        """A row a rank: its tokens, those that are trained, and its own figures, on the device."""
        fresh = self._own()
        own = torch.tensor(self._ranks.own(), dtype=fresh.dtype, device=fresh.device)
        table: torch.Tensor = self._accelerator.gather(torch.cat([fresh, own]).unsqueeze(0))
        return table

    def _taken(self, table: torch.Tensor) -> tuple[int, int]:
        """The sums of such a table, whose figures go to the ranks'."""
        rows = table.tolist()
        self._ranks.take(rows)
        return sum(int(row[0]) for row in rows), sum(int(row[1]) for row in rows)
