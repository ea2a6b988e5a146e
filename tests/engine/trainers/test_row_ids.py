"""Which rows made a batch, and how much of it is trained, travels with the batch and costs the step nothing on the way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import send_to_device

from engine.trainers.clock import StepClock
from engine.trainers.ranks import Ranks
from engine.trainers.token_counts import ROWS, TokenCounts, WithRows


def collate(rows: list[dict]) -> dict[str, Any]:
    """Three tokens a row, of which the last is trained and the first of each batch is padding."""
    mask = torch.ones(len(rows), 3, dtype=torch.long)
    mask[:1, 0] = 0
    labels = torch.full((len(rows), 3), -100)
    labels[:, 2] = 5
    return {"input_ids": torch.zeros_like(labels), "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize(
    ("rows", "ids"),
    [
        ([{"row": 7}, {"row": 3}], [7, 3]),
        ([{"rows": [4, 9]}, {"rows": [1]}], [4, 9, 1]),
        ([{}], [-1]),
        ([], []),
    ],
)
def test_the_batch_carries_the_ids_of_its_rows_packed_or_not(rows: list[dict], ids: list[int]) -> None:
    assert WithRows(collate)(rows)[ROWS].rows == ids


def test_tokens_are_counted_where_the_batch_is_made_and_padding_is_none() -> None:
    origin = WithRows(collate)([{"row": 0}, {"row": 1}])[ROWS]
    assert (origin.tokens, origin.trained) == (5, 2)

    def packed(rows: list[dict]) -> dict[str, Any]:
        return {"input_ids": torch.zeros(1, 6), "completion_mask": torch.tensor([[0, 0, 1, 0, 1, 1]])}

    origin = WithRows(packed)([{"row": 0}])[ROWS]
    assert (origin.tokens, origin.trained) == (6, 3)
    assert isinstance(origin.trained, int)


def test_no_library_walks_the_ids_on_their_way_to_the_device() -> None:
    batch = WithRows(collate)([{"row": number} for number in range(64)])
    assert send_to_device(batch, "cpu")[ROWS] is batch[ROWS]


def test_counts_wait_for_who_asks_but_no_longer_than_so_many_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.trainers.token_counts.UNREAD", 3)
    alone = SimpleNamespace(num_processes=1, device=torch.device("cpu"))
    counts = TokenCounts(alone, Ranks(StepClock()))
    counts.add(5, 2)
    counts.add(torch.tensor(6), torch.tensor(3))
    assert (counts.total, counts.trained) == (0, 0)
    assert counts.read() == (11, 5)
    for _ in range(3):
        counts.add(1, 1)
    assert (counts.total, counts.trained) == (14, 8)
