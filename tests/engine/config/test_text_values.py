"""What editing begins with means the value it was made from."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.config.coercion import coerce
from engine.config.text_values import as_typed, entries
from engine.config.tree import fields

PLAIN = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=12)


@given(st.dictionaries(TEXTS.filter(str.strip), PLAIN | TEXTS | st.lists(PLAIN | TEXTS, max_size=2), max_size=3))
@example({"<<": None})
def test_entries_of_a_mapping_are_what_they_were(value: dict[str, Any]) -> None:
    assert entries(as_typed(value)) == value
    assert repr(coerce(fields.model.chat_template_kwargs, as_typed(value))) == repr(value)


@pytest.mark.parametrize("rate", [3e-05, 0.000123456789, 2e-4, 1.0])
def test_a_number_keeps_its_digits(rate: float) -> None:
    assert coerce(fields.optim.learning_rate, as_typed(rate)) == rate
    assert as_typed(2.0) == "2"


def test_bare_values_stay_texts_where_only_texts_are_taken() -> None:
    assert entries("prompt: 7, answer: true", of_text=True) == {"prompt": "7", "answer": "true"}
