"""Which rows made a batch travels with the batch, and costs the step nothing on the way."""

from __future__ import annotations

import pytest
from accelerate.utils import send_to_device

from engine.trainers.saving import ROWS, WithRows


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
    assert WithRows(lambda rows: {})(rows)[ROWS].ids == ids


def test_no_library_walks_the_ids_on_their_way_to_the_device() -> None:
    batch = WithRows(lambda rows: {})([{"row": number} for number in range(64)])
    assert send_to_device(batch, "cpu")[ROWS] is batch[ROWS]
