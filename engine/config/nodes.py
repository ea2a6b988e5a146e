"""YAML text to plain values through ruamel's events, with limits kept while reading, and the line of every key.

Depth and size are counted event by event, so that a hostile file costs no more than the limits allow. Only the core
tags exist here: a text is a text, a date is a text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.events import AliasEvent, MappingStartEvent, ScalarEvent, SequenceStartEvent
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.resolver import VersionedResolver

from engine.errors import visible

DEEPEST = 64
MOST_VALUES = 4_000
LONGEST_NUMBER = 400
_CORE = "tag:yaml.org,2002:"
_TAGS = {"!", "?", *(_CORE + name for name in ("null", "bool", "int", "float", "str", "seq", "map"))}


class TooMuch(Exception):
    """The text is YAML, but not within the limits of a config; `sentence` says what and what to do."""

    def __init__(self, sentence: str, line: int | None = None) -> None:
        super().__init__(sentence)
        self.sentence, self.line = sentence, line


def plain(text: str) -> tuple[Any, dict[str, int]]:
    """The value that `text` holds, and the line (from 1) of every dotted path. Raises TooMuch or ruamel's errors."""
    # A line or a comma stands for at most a few values: hopeless texts are refused before they are scanned.
    if text.count("\n") + text.count(",") > MOST_VALUES:
        raise TooMuch(f"must hold at most {MOST_VALUES:,} values; got more. Put rows into a data file.")
    deepest = _bracket_depth(text)
    if deepest:
        raise TooMuch(f"must be at most {DEEPEST} levels deep; got more. Take out some brackets.", deepest)
    return _Builder(YAML(typ="safe", pure=True).parse(text)).document()


def _bracket_depth(text: str) -> int:
    """The line where plain brackets pass the depth allowed, 0 when they never do; quotes and comments are left out."""
    if text.count("[") + text.count("{") <= DEEPEST:
        return 0
    depth, line, quote, before = 0, 1, "", "\n"
    for sign in text:
        if sign == "\n":
            line += 1
        if quote:
            quote = "" if sign == quote or (quote == "#" and sign == "\n") else quote
        elif sign in "'\"" and before in " \n[{,:":
            quote = sign
        elif sign == "#" and before in " \n\t":
            quote = "#"
        elif sign in "[{":
            depth += 1
            if depth > DEEPEST:
                return line
        elif sign in "]}":
            depth -= 1
        before = sign
    return 0


class _Builder:
    """Builds plain values from events; remembers anchors by value and size, and refuses what is too much."""

    def __init__(self, events: Iterator[Any]) -> None:
        self.events = events
        self.resolver = VersionedResolver(version=(1, 2))
        self.lines: dict[str, int] = {}
        self.anchors: dict[str, tuple[Any, int]] = {}
        self.count = 0
        self.twice: list[str] = []

    def document(self) -> tuple[Any, dict[str, int]]:
        value, documents = None, 0
        for event in self.events:
            if type(event).__name__ == "DocumentStartEvent":
                documents += 1
                if documents > 1:
                    raise TooMuch(
                        "must be one document; got a second one after `---`. Keep one, and a file for each.",
                        event.start_mark.line + 1,
                    )
            elif isinstance(event, (ScalarEvent, MappingStartEvent, SequenceStartEvent, AliasEvent)):
                value = self.value(event, "", 1)
        if self.twice:
            raise TooMuch(f"must hold each key once; {'; '.join(self.twice[:5])}. Keep one of each.")
        return value, self.lines

    def add(self, number: int, line: int) -> None:
        self.count += number
        if self.count > MOST_VALUES:
            rule = f"must hold at most {MOST_VALUES:,} values, aliases counted in full"
            raise TooMuch(f"{rule}; got more. Write out only what is needed, and put rows into a data file.", line)

    def value(self, event: Any, path: str, depth: int) -> Any:
        line = event.start_mark.line + 1
        if isinstance(event, AliasEvent):
            if event.anchor not in self.anchors:
                name = visible(str(event.anchor))
                raise TooMuch(
                    f"must name an anchor that is whole; got *{name}. Put &{name} before a value above it, "
                    "or put the text in quotes.",
                    line,
                )
            value, size = self.anchors[event.anchor]
            self.add(size, line)
            return value
        before = self.count
        self.add(1, line)
        if depth > DEEPEST:
            raise TooMuch(f"must be at most {DEEPEST} levels deep; got more. Take out some brackets.", line)
        tag = event.tag
        if tag is not None and str(tag) not in _TAGS:
            raise TooMuch(f"must be plain values; got the tag {visible(str(tag))}. Remove the tag.", line)
        if isinstance(event, ScalarEvent):
            value = self.scalar(event, line)
        elif isinstance(event, SequenceStartEvent):
            value = self.sequence(path, depth)
        else:
            value = self.mapping(path, depth)
        if event.anchor:
            self.anchors[event.anchor] = (value, self.count - before)
        return value

    def sequence(self, path: str, depth: int) -> list[Any]:
        items: list[Any] = []
        for event in self.events:
            if type(event).__name__ == "SequenceEndEvent":
                break
            inner = f"{path}.{len(items)}" if path else str(len(items))
            self.lines[inner] = event.start_mark.line + 1
            items.append(self.value(event, inner, depth + 1))
        return items

    def mapping(self, path: str, depth: int) -> dict[Any, Any]:
        values: dict[Any, Any] = {}
        for event in self.events:
            if type(event).__name__ == "MappingEndEvent":
                break
            line = event.start_mark.line + 1
            key = self.value(event, path, depth + 1)
            if isinstance(key, (list, dict)):
                raise TooMuch(
                    "must have names as keys; got a list or a mapping as a key. Quote it if it is a name.", line
                )
            if (
                key == "<<" and isinstance(event, ScalarEvent) and event.implicit[0]
            ):  # in quotes it is a name like others
                raise TooMuch("must be written out; got a merge key `<<`. Write the settings themselves.", line)
            inner = f"{path}.{key}" if path else str(key)
            if key in values:
                self.twice.append(f"got {visible(inner)} on line {self.lines.get(inner, 0)} and again on line {line}")
            self.lines[inner] = line
            values[key] = self.value(next(self.events), inner, depth + 1)
        return values

    def scalar(self, event: ScalarEvent, line: int) -> Any:
        text = event.value
        tag = str(event.tag) if event.tag is not None and str(event.tag) not in ("!", "?") else ""
        if not tag:
            tag = str(self.resolver.resolve(ScalarNode, text, event.implicit)) if event.implicit[0] else f"{_CORE}str"
        if tag == f"{_CORE}null":
            return None
        if tag == f"{_CORE}bool":
            return text.lower() == "true"
        if tag in (f"{_CORE}int", f"{_CORE}float"):
            return _number(text, tag.endswith("int"), line)
        return text


def _number(text: str, whole: bool, line: int) -> Any:
    if len(text) > LONGEST_NUMBER:
        raise TooMuch(
            f"must hold numbers of at most {LONGEST_NUMBER} digits; got one of {len(text):,}. Shorten it.", line
        )
    digits = text.replace("_", "")
    try:
        if not whole:
            return float(
                digits.replace(".inf", "inf")
                .replace(".Inf", "inf")
                .replace(".INF", "inf")
                .lower()
                .replace(".nan", "nan")
            )
        sign, body = (digits[0], digits[1:]) if digits[:1] in "+-" else ("", digits)
        base = {"0x": 16, "0o": 8, "0b": 2}.get(body[:2].lower(), 10)
        return int(sign + body, base)
    except ValueError:
        return text
