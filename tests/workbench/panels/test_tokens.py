"""Tokens as laid out for a person: nothing lost, trained ones marked, nothing harmful drawn."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from workbench.panels.paint import Line
from workbench.panels.raw_rows import raw_lines
from workbench.panels.tokens import first_difference, is_special, lay_out, lines_of_row


def make(text: str, trained: bool = False, number: int = 7) -> dict[str, Any]:
    return {"id": number, "text": text, "trained": trained}


def plain(lines: list[Line]) -> list[str]:
    return ["".join(text for text, _ in line) for line in lines]


def styled(lines: list[Line], *kinds: str) -> list[str]:
    return [text for line in lines for text, kind in line if kind in kinds]


def test_trained_stretches_are_bordered_and_special_tokens_framed() -> None:
    row = [
        make("<|im_start|>"),
        make("assistant"),
        make("\n"),
        make("2021", True),
        make("<|im_end|>", True),
        make("\n"),
    ]
    lines = lay_out(row, 60)
    assert plain(lines) == ["‹|im_start|›assistant⏎", "▌2021‹|im_end|›▐⏎"]
    assert styled(lines, "trained") == ["2021"]
    assert styled(lines, "trained-special") == ["‹|im_end|›"]
    assert styled(lines, "special") == ["‹|im_start|›"]


def test_lines_are_broken_between_words_though_a_word_is_several_tokens() -> None:
    row = [
        make(text, trained)
        for text, trained in (
            ("Eat", 0),
            (" break", 0),
            ("fast", 0),
            (" of", 1),
            (" eggs", 1),
            ("\n", 1),
            ("    in", 0),
        )
    ]
    assert plain(lay_out(row, 12)) == ["Eat ", "breakfast▌ ", "of eggs⏎▐", "    in"]
    many = [make("<image>") for _ in range(4)] + [make("What"), make("<|im_end|>", True), make("\n")]
    assert plain(lay_out(many, 15)) == ["‹image›‹image›", "‹image›‹image›", "What", "▌‹|im_end|›▐⏎"]
    assert plain(lay_out([make("日本語の行です")], 9)) == ["日本語の", "行です"]
    assert plain(lay_out([make("a " + "b" * 12)], 9)) == ["a bbbbbbb", "bbbbb"]


def test_an_image_that_stands_in_a_row_leaves_room_for_its_words() -> None:
    row = {"images": [f"data:image/png;base64,{'iVBO' * 60}"], "text": "What is it?"}
    assert plain(raw_lines(row, 60)) == ['images  ["data:image/png;base64,… (180 bytes)"]', "text    What is it?"]


def test_a_trained_stretch_that_ends_with_a_line_break_keeps_its_border_on_that_line() -> None:
    assert plain(lay_out([make("a", True), make("\n", True), make("b")], 20)) == ["▌a⏎▐", "b"]


def test_the_name_of_a_part_is_whole_beside_it() -> None:
    row = {"parts": {"prompt": [make("2 + 2?")], "good answer": [make("4", True)]}}
    assert plain(lines_of_row(row, 40)) == ["prompt      2 + 2?", "good answer ▌4▐"]


def test_only_the_forms_of_special_tokens_are_taken_for_special() -> None:
    assert all(is_special(make(text)) for text in ("<|im_end|>", "<s>", "</s>", "[CLS]", "<pad>"))
    assert not any(is_special(make(text)) for text in ("<", "<<", "[1]", "a < b > c", "[x]", ""))
    assert not is_special({"text": "<s>", "special": False})


def test_ids_stand_under_their_tokens() -> None:
    assert plain(lay_out([make("a", number=12345), make("bcd", True, 6)], 40, ids=True)) == ["a     bcd ", "12345 6   "]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.text(max_size=30), max_size=30), st.integers(8, 60), st.booleans())
def test_no_line_is_too_wide_and_no_text_is_lost(texts: list[str], width: int, ids: bool) -> None:
    lines = plain(lay_out([make(text, index % 3 == 0) for index, text in enumerate(texts)], width, ids))
    assert all(cell_len(line) <= width + 1 for line in lines)  # a border may hang on the end of a full line
    wanted = {character for text in texts for character in text if character.isascii() and character.isalnum()}
    assert wanted <= set("".join(lines))
    assert not any(ord(character) < 32 or character == "\x7f" for line in lines for character in line)


def test_turns_stand_beside_their_tokens() -> None:
    tokens = [make("<|im_start|>"), make("hi"), make("<|im_end|>"), make("there", True), make("<|im_end|>", True)]
    turns = [{"role": "user", "start": 0, "end": 3}, {"role": "assistant", "start": 3, "end": 5}]
    lines = plain(lines_of_row({"parts": {"input": tokens}, "turns": turns}, 60))
    assert lines == ["user        ‹|im_start|›hi‹|im_end|›", "assistant   ▌there‹|im_end|›▐"]


def test_a_pair_stands_side_by_side_with_its_first_difference_marked() -> None:
    chosen = [make("the ", True, 1), make("day", True, 2), make("!", True, 3)]
    rejected = [make("the ", True, 1), make("night", True, 9)]
    assert first_difference(chosen, rejected) == 1
    assert first_difference(chosen, chosen) is None
    assert first_difference(chosen, chosen[:2]) == 2
    lines = lines_of_row({"parts": {"prompt": [make("which?")], "chosen": chosen, "rejected": rejected}}, 60)
    text = plain(lines)
    assert text[0].startswith("prompt")
    assert text[2].startswith("chosen, 3 tokens")
    assert "rejected, 2 tokens" in text[2]
    assert "day" in text[3]
    assert "night" in text[3]
    assert styled(lines, "differs") == ["day", "night"]


def test_a_very_long_row_shows_its_head_and_its_tail() -> None:
    text = "\n".join(plain(lay_out([make(f"w{index} ", number=index) for index in range(50_000)], 80)))
    assert "w0 " in text
    assert "w49999" in text
    assert "42,000 tokens not shown" in text
    marked = lay_out([make(f"w{index} ", index in (49_990, 49_991)) for index in range(50_000)], 80)
    assert "▌w49990 w49991 ▐w49992" in "".join(plain(marked)), "borders know where the tail stands"


def test_packed_rows_are_bands_with_their_place_and_position_ids() -> None:
    row = {
        "parts": {"input": [make("a"), make("b"), make("c")]},
        "documents": [2, 1],
        "separate": True,
        "source_rows": [17, 4],
        "positions": [0, 1, 0],
    }
    lines = plain(lines_of_row(row, 70))
    assert lines[0] == "A pack of 2 rows; no token sees another row."
    assert lines[2].startswith(" row 17: 2 tokens at 0, position ids from 0")
    assert lines[4].startswith(" row 4: 1 tokens at 2, position ids from 0")


def test_a_row_that_training_leaves_out_says_why() -> None:
    lines = plain(lines_of_row({"parts": {}, "left_out": "nothing to train [/b]\x1b[2J"}, 60))
    assert lines[0] == "Training leaves this row out: nothing to train [/b]␛[2J"


def test_escape_sequences_and_markup_are_text() -> None:
    lines = plain(lay_out([make("\x1b]0;evil\x07 [/bold] \u202e", True)], 60))
    assert lines == ["▌␛]0;evil␇ [/bold] \\u202e▐"]
