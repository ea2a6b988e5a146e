"""Lines of text: exact in cells, safe for a terminal, wrapped without losing a word."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.style import Style

from workbench.gate import BAD
from workbench.panels.paint import clean, columns, cut, fold, strip, wrap

TEXTS = st.text(max_size=200)


@given(TEXTS, st.integers(0, 60))
def test_cut_text_fits(text: str, width: int) -> None:
    assert cell_len(cut(clean(text), width)) <= width


@given(TEXTS, st.integers(2, 40))
def test_wrapped_lines_fit_and_keep_every_letter(text: str, width: int) -> None:
    lines = wrap(clean(text), width)
    assert all(cell_len(line) <= width for line in lines)
    assert "".join("".join(lines).split()) == "".join(clean(text).split())


@given(TEXTS, st.integers(8, 40))
def test_folded_text_fits_and_is_whole_with_its_spaces(text: str, width: int) -> None:
    first, *rest = fold(clean(text), width, "> ")
    assert all(cell_len(piece) <= width for piece in (first, *rest))
    assert first + "".join(piece.removeprefix("> ") for piece in rest) == clean(text)


@given(st.lists(st.tuples(TEXTS, st.just("")), max_size=5), st.integers(1, 60))
def test_a_strip_has_its_width_whatever_it_holds(parts: list[tuple[str, str]], width: int) -> None:
    made = strip([(clean(text), name) for text, name in parts], width, lambda name: Style(), Style())
    assert sum(cell_len(segment.text) for segment in made) == width


@given(TEXTS)
def test_clean_text_holds_nothing_that_a_terminal_obeys(text: str) -> None:
    assert not BAD.search(clean(text))


def test_a_megabyte_is_drawn_as_two_thousand_letters() -> None:
    assert len(clean("x" * 1_000_000)) == 2001


def test_columns_keep_the_value_and_shorten_the_label() -> None:
    assert "".join(text for text, _ in columns("a long label", "42", 10)) == "a long… 42"
