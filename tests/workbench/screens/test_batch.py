"""The rows of a step: the text of some, the numbers of all."""

from __future__ import annotations

from workbench.screens.batch import BatchRead, BatchView


def test_rows_whose_text_is_not_read_are_named_by_their_numbers() -> None:
    view = BatchView()
    view.answer = BatchRead([7, 8, 9, 1_000], [{"text": "seven"}, None])
    text = ["".join(part for part, _ in line) for line in view.lines(60)]
    assert text[0] == "row 7"
    assert "its text cannot be shown from here" in text
    assert text[-1] == "and rows 9, 1000"
