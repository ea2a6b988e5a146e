"""Batches of rows: how wide they are, and what is read and learned of them."""

from __future__ import annotations

from engine.data.collate import LanguageCollator
from engine.data.pretokenized import IGNORED


def test_a_batch_is_as_wide_as_its_longest_row_and_no_padding_is_read_or_learned():
    rows = [{"input_ids": [5, 6, 7, 8, 9], "labels": [5, 6, 7, 8, 9]}, {"input_ids": [3, 4], "labels": [IGNORED, 4]}]
    batch = LanguageCollator(1)(rows)
    assert {name: tuple(value.shape) for name, value in batch.items()} == dict.fromkeys(batch, (2, 5))
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
    assert batch["input_ids"][1].tolist() == [3, 4, 1, 1, 1]
    assert batch["labels"][1].tolist() == [IGNORED, 4, IGNORED, IGNORED, IGNORED]
