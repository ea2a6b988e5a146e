"""Which format a source has, said with what was seen and why; an explicit format or column map always wins.

The first rows are looked at (256 by default), each for itself, so a file that mixes formats is found with the row where
it changes. Standard library only: the frontends call this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.data.formats import FORMATS, Format, read_example
from engine.data.mapped import Rows
from engine.data.parts import Example, FormatError, Row, names
from engine.errors import DataError, visible

LOOK = 256
TOLD = 5  # bad rows that are named
CAREFUL = 4 << 20  # bytes of a row that is only looked at from outside


@dataclass(frozen=True)
class Detection:
    """What a source holds. `problems` are sentences with the place; empty means that every row looked at can be read."""

    format: str | None
    columns: Mapping[str, str]
    why: str
    problems: tuple[str, ...] = ()
    example: Row | None = None
    looked: int = 0
    bad: int = 0
    """How many of the rows looked at cannot be read."""
    images: Mapping[int, tuple[Any, ...]] = field(default_factory=dict)
    """The images of each row looked at that has any, as the row gives them, by the number of the row."""
    bad_at: tuple[int, ...] = ()
    """The numbers of the bad rows, of which `problems` names the first."""


def detect(
    rows: Rows, columns: Mapping[str, str] | None = None, format: str | None = None, look: int = LOOK
) -> Detection:
    """The format of a source by its first rows. Never raises for bad data: problems are part of the answer."""
    named = dict(columns or {})
    found: dict[int, str] = {}
    seen: list[tuple[int, Row]] = []
    for index in range(look):
        try:
            if index and rows.size(index) > CAREFUL:
                continue
            seen.append((index, rows[index]))
        except IndexError:
            break
        except DataError as unreadable:
            if index >= rows.known():
                # The file breaks off here: no row of it could be reached after this one.
                return Detection(None, named, "the source cannot be read", (unreadable.full_message,), looked=len(seen))
            found[index] = unreadable.full_message
    bad = len(found)
    if not seen:
        problems = tuple(found.values())[:TOLD] or ("no rows",)
        return Detection(None, named, "no row could be read", problems, looked=bad, bad=bad, bad_at=tuple(found))
    looked = bad + len(seen)
    at, first = seen[0]
    known = FORMATS.get(format) if format else _first_format(first, named)
    if known is None and not format:
        # A first row that fits nothing is one bad row where those after it fit.
        at, first = next(((index, row) for index, row in seen if _first_format(row, named) is not None), seen[0])
        known = _first_format(first, named)
    elif not format and known is not None and known.name == "prompts":
        # A first row without its answer reads as a prompt alone; where most with the same columns have one, they tell the format.
        alike = [(index, row) for index, row in seen if row.keys() == first.keys()]
        fuller = [(index, row) for index, row in alike if _answered(row, named)]
        if 2 * len(fuller) >= len(alike):
            at, first = fuller[0]
            known = _first_format(first, named)
    if known is None:
        sentence = (
            f"unknown format {visible(format)}; known are {', '.join(FORMATS)}"
            if format
            else f"columns {names(first)} fit no known format; name one with format, and its columns with columns"
        )
        return Detection(None, named, f"columns {names(first)}", (sentence,), first, looked, bad)
    mapping = _columns(known, first, named)
    images: dict[int, tuple[Any, ...]] = {}
    for index, row in seen:
        problem, shown = _check_row(rows, index, row, known, mapping, named if not format else None, at)
        if shown:
            images[index] = shown
        if problem:
            found[index] = problem
    why, places = _why(known, mapping, first, format, rows), tuple(sorted(found))
    problems = tuple(found[index] for index in places[:TOLD])
    return Detection(known.name, mapping, why, problems, first, looked, len(found), images, places)


def _answered(row: Row, named: Mapping[str, str]) -> bool:
    """Whether a row is of a format that holds what is to be said, not a prompt alone."""
    found = _first_format(row, named)
    return found is not None and found.name != "prompts"


def _why(known: Format, mapping: Mapping[str, str], first: Row, format: str | None, rows: Rows) -> str:
    mapping = {part: column for part, column in mapping.items() if part in known.parts or f"{part}?" in known.parts}
    used = [column for part, column in mapping.items() if part in known.parts or column in first]
    renamed = ", ".join(
        f"{visible(column)} is the {part}" for part, column in mapping.items() if column != part and column in first
    )
    told = "named in the config" if format else f"columns {', '.join(map(visible, used))}"
    sentence = f"{told}: {known.title}" + (f" ({renamed})" if renamed else "")
    return f"{sentence}; {rows.note}" if rows.note else sentence


def _check_row(
    rows: Rows,
    index: int,
    row: Row,
    known: Format,
    mapping: Mapping[str, str],
    free: Mapping[str, str] | None,
    at: int,
) -> tuple[str | None, tuple[Any, ...]]:
    """What is wrong with a row, and the images that it names; `at` is the row that told the format."""
    if free is not None and any(row.get(mapping.get(part, part)) is None for part in known.required()):
        other = _first_format(row, free)
        if other is not None and other is not known:
            others = "before" if index > at else "after"
            place = rows.error(index, f"this row is {other.title}, the rows {others} are {known.title}; row {index}")
            return place.message, ()
    try:
        checked = read_example(row, known.name, mapping)
    except FormatError as problem:
        return rows.error(index, problem.message, problem.hint).full_message, ()
    return rows.error(index, "the row is empty").message if _empty(checked) else None, images_of(checked)


def images_of(example: Example) -> tuple[Any, ...]:
    """The images of a row as it gives them: those of its column, or of the parts of any of its turns."""
    if example.images:
        return tuple(example.images)
    turns = [
        turn for chat in (example.prompt, example.chosen, example.rejected) if isinstance(chat, list) for turn in chat
    ]
    parts = [part for turn in turns if isinstance(turn.get("content"), list) for part in turn["content"]]
    return tuple(part.get("image") for part in parts if part.get("type") == "image")


def _empty(example: Example) -> bool:
    return not (
        example.messages or example.text or example.prompt or example.chosen or example.input_ids or example.drawn
    )


def _first_format(row: Mapping[str, Any], named: Mapping[str, str]) -> Format | None:
    for known in FORMATS.values():
        if all(_column(known, part, row, named) for part in known.required()) and known.looks(
            row, _columns(known, row, named)
        ):
            return known
    return None


def _columns(known: Format, row: Mapping[str, Any], named: Mapping[str, str]) -> dict[str, str]:
    mapping = {part.removesuffix("?"): _column(known, part, row, named) for part in known.parts}
    return {part: column for part, column in mapping.items() if column} | dict(named)


def _column(known: Format, part: str, row: Mapping[str, Any], named: Mapping[str, str]) -> str | None:
    name = part.removesuffix("?")
    if name in named:
        return named[name]
    return next((column for column in known.parts[part] if row.get(column) is not None), None)
