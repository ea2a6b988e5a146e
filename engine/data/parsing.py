"""One row from its bytes, strictly: what is no UTF-8 or no plain JSON object is refused with its place and its text.

Python's own parser takes NaN, a key that stands twice and half a character; rows of data must not hold them. Standard
library only.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from engine.errors import DataError, visible

Row = dict[str, Any]

SAMPLE = 80  # characters of a row that a refusal shows
_SURROGATE = re.compile("[\ud800-\udfff]")


def parse_object(raw: bytes, path: str, line: int, column: int = 1) -> Row:
    """One JSON object from bytes, strictly: UTF-8, no NaN, no key twice, no half characters."""
    text = decode(raw, path, line, column)
    if "\0" in text and not text.strip("\0 \t\r"):
        message = f"{len(raw):,} zero bytes stand in the place of a row, as a writer leaves them that was cut off"
        raise DataError(
            message, "Take them out, or write the file again.", path=visible(path), line=line, column=column
        )
    try:
        row = _DECODER.decode(text)
    except json.JSONDecodeError as problem:
        found_line = line + problem.lineno - 1
        found_column = problem.colno + (column - 1 if problem.lineno == 1 else 0)
        # Parsers of other tools name no line; the person needs to see the very spot.
        spot = text[max(problem.pos - SAMPLE // 2, 0) : problem.pos + SAMPLE // 2]
        message = f"not a JSON object: {problem.msg.lower()}; near {quoted(spot)}"
        raise DataError(message, path=visible(path), line=found_line, column=found_column) from None
    except _BadValue as problem:
        raise DataError(f"{problem}; in {sample(raw)}", path=visible(path), line=line) from None
    except RecursionError:
        raise DataError(f"nested too deeply: {sample(raw)}", path=visible(path), line=line) from None
    if not isinstance(row, dict):
        kind = {list: "a list", str: "a string", type(None): "null"}.get(type(row), "a number")
        message = f"each row must be a JSON object; got {kind}: {sample(raw)}"
        raise DataError(message, path=visible(path), line=line, column=column)
    if b"\\ud" in raw or b"\\uD" in raw:
        flat = json.dumps(row, ensure_ascii=False)
        if _SURROGATE.search(flat):
            message = f"half of a character (a lone surrogate escape): {sample(raw)}"
            raise DataError(message, "Write the file again as UTF-8.", path=visible(path), line=line)
    return row


class _BadValue(ValueError):
    """JSON that Python accepts and data must not hold."""


def _constant(name: str) -> NoReturn:
    raise _BadValue(f"{name} is not a JSON value")


def _object(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _BadValue(f"the key {quoted(twice)} stands twice in one object")
    return row


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant)


def decode(raw: bytes, path: str, line: int, column: int = 1) -> str:
    """The text of UTF-8 bytes that begin at this place. Raises `DataError` with the place of the first bad byte."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as problem:
        before = raw[: problem.start]
        line += before.count(b"\n")
        last = before.rsplit(b"\n", 1)[-1].decode("utf-8")
        if b"\n" in before:
            column = 1
        bad = raw[problem.start]
        spot = last[-30:] + f"\\x{bad:02x}" + raw[problem.start + 1 : problem.start + 30].decode("utf-8", "replace")
        message = f"not UTF-8: byte 0x{bad:02x}; near {quoted(spot)}"
        hint = "Convert the file, for example with iconv -t UTF-8."
        raise DataError(message, hint, path=visible(path), line=line, column=column + len(last)) from None


def quoted(text: str) -> str:
    """A piece of the file inside a message."""
    return f"“{visible(text)}”"


def sample(raw: bytes) -> str:
    """The beginning of a row inside a message."""
    text = raw[: SAMPLE * 4].decode("utf-8", "replace")
    return quoted(text[:SAMPLE] + ("…" if len(raw) > SAMPLE * 4 or len(text) > SAMPLE else ""))
