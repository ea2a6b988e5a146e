"""`builtin/dates`: generated chat rows that turn a date, written in one of many ways, into ISO form.

Owns which calendar days are held out and how a date can be spelled. The split is by day, not by row: a held-out day
occurs in no training row in any spelling, whatever the seed, so an exact answer on it was not learned by heart. Every
spelling is unambiguous by itself: numeric ones name their order, short years mean 1950 to 2049. Standard library only.
"""

from __future__ import annotations

import calendar
import datetime
import functools
import random
from collections.abc import Callable, Sequence
from typing import TypeVar

Row = dict[str, list[dict[str, str]]]
T = TypeVar("T")

FIRST, LAST = datetime.date(1950, 1, 1), datetime.date(2049, 12, 31)
TRAIN_ROWS = 24_000
HELD_OUT_DAYS = 1_000
# Days of prompts that are shown while a model trains: always held out, so that the shown answers are honest.
PINNED = (
    ("What is 3 March 2021 in ISO form?", datetime.date(2021, 3, 3)),
    ("Write Saturday, July 20th, 1996 in ISO form.", datetime.date(1996, 7, 20)),
    ("What is the 29th of February '64 in ISO form?", datetime.date(1964, 2, 29)),
    ("What is 10/11/2035 (month first) in ISO form?", datetime.date(2035, 10, 11)),
)
PROMPTS = tuple(prompt for prompt, _ in PINNED)

MONTHS = tuple(calendar.month_name[1:])
MONTHS_SHORT = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_ONES = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "eleventh")
_TEENS = ("twelfth", "thirteenth", "fourteenth", "fifteenth", "sixteenth", "seventeenth", "eighteenth", "nineteenth")
_TWENTIES = tuple(f"twenty-{word}" for word in _ONES[:9])
DAYS_IN_WORDS = (*_ONES, *_TEENS, "twentieth", *_TWENTIES, "thirtieth", "thirty-first")
QUESTIONS = (
    "What is {} in ISO form?",
    "Write {} in ISO form.",
    "Convert {} to ISO form.",
    "ISO form of {}?",
    "{} in ISO form, please.",
    "{}",
)
_NUMERIC = (
    "{d:02}.{m:02}.{y}",
    "{d}.{m}.{y}",
    "{d}/{m}/{y} (day first)",
    "{d:02}/{m:02}/{y} (day first)",
    "{m}/{d}/{y} (month first)",
    "{m:02}/{d:02}/{y} (month first)",
    "{m:02}/{d:02}/{yy:02} (month first)",
    "{y}/{m:02}/{d:02}",
)
_WRITTEN = (
    "{day} {month} {year}",
    "{day} {month}, {year}",
    "{month} {day}, {year}",
    "{month} {day} {year}",
    "{nth} of {month}, {year}",
    "the {nth} of {month} {year}",
    "{year} {month} {day}",
    "{day}-{month}-{year}",
)


def rows(split: str = "train", seed: int = 0, count: int | None = None) -> list[Row]:
    """`count` chat rows of one question and its answer; 24,000 for training, 1,000 held-out ones by default.

    Training days are drawn with repetition; the first 1,000 eval rows ask for 1,000 different held-out days.
    """
    if split not in ("train", "eval"):
        raise ValueError(f"split must be train or eval; got {split!r}")
    draw = random.Random(f"builtin/dates {split} {seed}")
    if split == "train":
        days: Sequence[datetime.date] = training_days()
        return [_row(pick(draw, days), draw) for _ in range(TRAIN_ROWS if count is None else count)]
    days = held_out_days()
    start = int(draw.random() * len(days))
    total = HELD_OUT_DAYS if count is None else count
    return [_row(days[(start + number) % len(days)], draw) for number in range(total)]


@functools.cache
def held_out_days() -> tuple[datetime.date, ...]:
    """The 1,000 days that no training row asks for, in a fixed mixed order; the days of the pinned prompts among them."""
    draw = random.Random("builtin/dates held out")
    chosen = dict.fromkeys(day for _, day in PINNED)
    span = (LAST - FIRST).days + 1
    while len(chosen) < HELD_OUT_DAYS:
        chosen[FIRST + datetime.timedelta(days=int(draw.random() * span))] = None
    return tuple(chosen)


@functools.cache
def training_days() -> tuple[datetime.date, ...]:
    """Every day from 1950 to 2049 that is not held out."""
    held_out = set(held_out_days())
    span = (LAST - FIRST).days + 1
    days = (FIRST + datetime.timedelta(days=number) for number in range(span))
    return tuple(day for day in days if day not in held_out)


def spell(day: datetime.date, draw: random.Random) -> str:
    """One way of writing `day`, drawn at random from all that are known here."""
    if draw.random() < 0.4:
        return pick(draw, _NUMERIC).format(d=day.day, m=day.month, y=day.year, yy=day.year % 100)
    in_words = draw.random() < 0.15
    text = pick(draw, _WRITTEN).format(
        day=_spell_out(day.day) if in_words else pick(draw, _DAY_FORMS)(day.day),
        nth=_spell_out(day.day) if in_words else _ordinal(day.day),
        month=pick(draw, (MONTHS, MONTHS, MONTHS_SHORT))[day.month - 1],
        year=f"'{day.year % 100:02}" if draw.random() < 0.2 else str(day.year),
    )
    if draw.random() < 0.2:
        weekday = WEEKDAYS[day.weekday()]
        text = f"{weekday}, {text}" if draw.random() < 0.5 else f"{weekday[:3]} {text}"
    return text if in_words else pick(draw, _CASES)(text)


def _row(day: datetime.date, draw: random.Random) -> Row:
    question = pick(draw, QUESTIONS).format(spell(day, draw))
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": day.isoformat()}]}


def _ordinal(number: int) -> str:
    suffix = "th" if 11 <= number <= 13 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"


def _spell_out(number: int) -> str:
    return DAYS_IN_WORDS[number - 1]


_DAY_FORMS: tuple[Callable[[int], str], ...] = (str, str, _ordinal, _ordinal, "{:02}".format)
_CASES: tuple[Callable[[str], str], ...] = (*(str,) * 6, str.upper, str.lower)


def pick(draw: random.Random, choices: Sequence[T]) -> T:
    """One of these, the same in every Python version: `random()` alone is promised to give the same numbers."""
    return choices[int(draw.random() * len(choices))]
