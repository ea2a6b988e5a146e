"""The generated dates: held-out days stay unseen in every spelling, spellings say one day, seeds repeat."""

from __future__ import annotations

import datetime
import random
import re
import subprocess
import sys

import pytest

from engine.builtin import dates


def answers(rows: list[dates.Row]) -> list[str]:
    return [row["messages"][-1]["content"] for row in rows]


def questions(rows: list[dates.Row]) -> list[str]:
    return [row["messages"][0]["content"] for row in rows]


@pytest.mark.parametrize("seed", [0, 1, 2, 42])
def test_no_training_row_asks_for_a_held_out_day_in_any_spelling(seed: int) -> None:
    held_out = {day.isoformat() for day in dates.held_out_days()}
    train = dates.rows("train", seed=seed)
    assert held_out.isdisjoint(answers(train))
    assert {answer for other in (0, 7) for answer in answers(dates.rows("eval", seed=other))} == held_out
    # Told from the question's own text too, by a reader that shares no code with the spelling.
    read = [day for day in map(read_day, questions(train)) if day]
    assert len(read) > len(train) / 4
    assert held_out.isdisjoint(day.isoformat() for day in read)


def test_a_thousand_different_days_are_held_out_and_the_pinned_ones_are_among_them() -> None:
    days = dates.held_out_days()
    assert len(set(days)) == len(days) == 1000
    assert {day for _, day in dates.PINNED} <= set(days)
    assert len(dates.training_days()) == 36_525 - 1000
    assert len(set(answers(dates.rows("eval")))) == 1000


def test_the_same_seed_gives_the_same_rows_and_another_seed_others() -> None:
    assert dates.rows("train", seed=3, count=200) == dates.rows("train", seed=3, count=200)
    assert dates.rows("train", seed=3, count=200) == dates.rows("train", seed=3)[:200]
    assert dates.rows("train", seed=3, count=200) != dates.rows("train", seed=4, count=200)
    # Pinned so that no Python version changes the data set unnoticed.
    assert questions(dates.rows("train", seed=0, count=3)) == THE_FIRST_THREE


def test_pinned_prompts_ask_for_the_days_they_name() -> None:
    for prompt, day in dates.PINNED:
        assert (read_day(prompt) or day) == day
    assert dates.PROMPTS[0] == "What is 3 March 2021 in ISO form?"


def test_each_day_has_many_spellings_and_the_weekday_is_right() -> None:
    day = datetime.date(2031, 5, 16)  # a Friday
    draw = random.Random(0)
    spelled = {dates.spell(day, draw) for _ in range(5000)}
    assert len(spelled) > 200
    weekdays = {
        found
        for text in spelled
        for found in re.findall(r"(?i)\b([a-z]{3})(?:day|sday|nesday|rsday|urday)?\b,? ", text)
    }
    named = {name.lower() for name in weekdays} & {name[:3].lower() for name in dates.WEEKDAYS}
    assert named == {"fri"}


def test_two_days_never_share_a_spelling() -> None:
    said: dict[str, str] = {}
    for row in dates.rows("train", seed=5) + dates.rows("eval", seed=5, count=5000):
        question, answer = row["messages"][0]["content"], row["messages"][1]["content"]
        assert said.setdefault(question, answer) == answer


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="train or eval"):
        dates.rows("test")  # type: ignore[arg-type]


def test_dates_need_neither_torch_nor_numpy() -> None:
    code = "import sys; from engine.builtin import dates; dates.rows('eval'); print([n for n in ('torch', 'numpy', 'transformers') if n in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


MONTHS = {name[:3].lower(): number for number, name in enumerate(dates.MONTHS, 1)}


def read_day(text: str) -> datetime.date | None:
    """The day of a spelling with a numeric day, a month's name and a four-digit year, or of digits in a stated order."""
    if found := re.search(r"(\d+)/(\d+)/(\d{4}) \((day|month)", text):
        first, second, year = map(int, found.groups()[:3])
        day, month = (first, second) if found[4] == "day" else (second, first)
        return datetime.date(year, month, day)
    if found := re.search(r"\b(\d{4})/?(\d\d)/?(\d\d)\b", text):
        return datetime.date(*map(int, found.groups()))
    month_name = re.search(r"(?i)(?<![a-z])(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*(?![a-z])", text)
    year, day = re.search(r"\b\d{4}\b", text), re.search(r"(?i)(?<!\d)(\d{1,2})(?:st|nd|rd|th)?(?!\d)", text)
    if not (month_name and year and day) or "'" in text:
        return None
    return datetime.date(int(year[0]), MONTHS[month_name[1].lower()], int(day[1]))


THE_FIRST_THREE = [
    "Convert 03/25/2006 (month first) to ISO form.",
    "27.03.1954 in ISO form, please.",
    "ISO form of Wednesday, Dec 4 2013?",
]
