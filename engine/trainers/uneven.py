"""Rows that do not divide over the processes: each of them counts once, and a process that has none left fills in.

accelerate fills up an epoch's last batches with rows of its beginning, which would be learned from, and measured, twice. Here
they are left as short as they are; a process without a row computes one all the same, since all of them make the same passes
together, and its loss counts nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from accelerate.data_loader import BatchSamplerShard

from engine.data.pretokenized import IGNORED

_LABELS = ("labels", "shift_labels")


class Part(NamedTuple):
    """What a process has of a batch."""

    weight: float = 1.0
    """Its rows as a share of what a process has on the average, by which the mean over processes of their means is the one over
    all rows; 0 where it only fills in."""
    uneven: bool = False
    """Whether processes may have more or fewer rows than others; the same on all of them."""

    @property
    def fills_in(self) -> bool:
        """Whether its rows are another process's, or none of this batch's."""
        return not self.weight


WHOLE = Part()


def part_of(own: int, rows: int, processes: int) -> Part:
    """The part of a process that has `own` of so many rows, which did not suffice for all."""
    return Part(own * processes / rows, uneven=True)


class UnevenShare(BatchSamplerShard):
    """One process's batches: as many on each, of the last ones some shorter. `last` is this one's part of the last."""

    last = WHOLE

    def __iter__(self) -> Iterator[list[Any]]:
        self.last = WHOLE
        together: list[list[Any]] = []
        filling: list[Any] = []
        for batch in self.batch_sampler:
            filling = filling or batch[:1]
            together.append(batch)
            if len(together) == self.num_processes and len(batch) == self.batch_size:
                yield together[self.process_index]
                together = []
        if together:
            own = together[self.process_index] if self.process_index < len(together) else []
            self.last = part_of(len(own), sum(map(len, together)), self.num_processes)
            yield own or filling


def left_uneven(loader: Any) -> UnevenShare | None:
    """Has the loader of one of several processes leave its last batch as it is; None where it reads all rows itself."""
    share: Any = getattr(loader, "batch_sampler", None)
    if isinstance(share, UnevenShare):
        return share
    if type(share) is not BatchSamplerShard or share.drop_last or share.split_batches or not share.even_batches:
        return None
    share.__class__ = UnevenShare
    assert isinstance(share, UnevenShare)
    return share


class Uncounted:
    """`with` it, the labels of a batch that only fills in are counted as none; its loss is computed from them as they are."""

    def __init__(self) -> None:
        self._kept: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def hide(self, batch: dict[str, Any]) -> None:
        kept = {name: batch[name] for name in _LABELS if isinstance(batch.get(name), torch.Tensor)}
        self._kept.append((batch, kept))
        batch.update({name: torch.full_like(labels, IGNORED) for name, labels in kept.items()})

    def __enter__(self) -> Uncounted:
        return self

    def __exit__(self, *_: object) -> None:
        for batch, kept in self._kept:
            batch.update(kept)


def trained_tokens(batch: dict[str, Any]) -> torch.Tensor:
    """How many tokens of a batch a loss over them is the mean of."""
    labels: torch.Tensor = batch["shift_labels"] if "shift_labels" in batch else batch["labels"][..., 1:]
    return labels.ne(IGNORED).sum()


def mean_of_all(loss: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Of each process's mean over its tokens the mean over those of all. All processes call it together."""
    sums = torch.stack([loss.float() * tokens, tokens.float()])
    torch.distributed.all_reduce(sums)
    return sums[0] / sums[1].clamp(min=1)


@contextlib.contextmanager
def gathering(accelerator: Any, part: Part, *, means: int = 0) -> Iterator[None]:
    """Within it what is gathered is what processes have of a batch, a row or a number each, whose sizes may differ; what a process
    that only fills in has is left out. The first `means` single numbers that are no counts are means over rows, and become that
    of all."""
    ask, cut = accelerator.gather, accelerator.gather_for_metrics
    left = means

    def gather(own: Any) -> Any:
        nonlocal left
        if not isinstance(own, torch.Tensor):
            return ask(own)
        if left and own.dim() == 0 and own.is_floating_point():
            left -= 1
            weight = torch.full_like(own, part.weight, dtype=torch.float32)
            product = torch.zeros_like(weight) if part.fills_in else own.float() * weight
            total, weights = ask(torch.stack([product, weight])[None]).sum(0)
            return (total / weights)[None]
        rows = own.unsqueeze(0) if own.dim() == 0 else own
        kept = 0 if part.fills_in else len(rows)
        counts: list[tuple[int, int]] = ask(torch.tensor([[len(rows), kept]], device=own.device)).tolist()
        most = max(held for held, _ in counts)
        padded = rows.new_zeros(most, *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = ask(padded).split(most)
        return torch.cat([each[:kept] for each, (_, kept) in zip(parts, counts, strict=True)])

    accelerator.gather = gather if part.uneven else ask
    # accelerate would take off as many numbers as rows are filled up at the end, from each batch of the last step.
    accelerator.gather_for_metrics = accelerator.gather
    try:
        yield
    finally:
        accelerator.gather, accelerator.gather_for_metrics = ask, cut
