"""Batches of rows: how wide they are, and what is read and learned of them."""

from __future__ import annotations

import pytest

from engine.data.collate import LanguageCollator
from engine.data.pretokenized import IGNORED


@pytest.mark.parametrize(("multiple", "width"), [(None, 5), (1, 5), (4, 8), (5, 5)])
def test_a_batch_is_as_wide_as_its_longest_row_up_to_a_multiple_and_no_padding_is_read_or_learned(multiple, width):
    rows = [{"input_ids": [5, 6, 7, 8, 9], "labels": [5, 6, 7, 8, 9]}, {"input_ids": [3, 4], "labels": [IGNORED, 4]}]
    batch = LanguageCollator(1, pad_to_multiple_of=multiple)(rows)
    assert {name: tuple(value.shape) for name, value in batch.items()} == dict.fromkeys(batch, (2, width))
    assert batch["attention_mask"].sum(1).tolist() == [5, 2]
    assert batch["input_ids"][1].tolist() == [3, 4] + [1] * (width - 2)
    assert batch["labels"][1].tolist() == [IGNORED, 4] + [IGNORED] * (width - 2)
