"""Values as a person types them: the text with which editing begins, and the entries of a mapping back from such a text.

What `as_typed` writes means the same value again (`engine.config.coercion`), so that adding an entry in a form changes
no other one: a number keeps its digits and stays a number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from engine.config.files import parse_value

_BARE = re.compile(r"[\w./+-]([\w ./+-]*[\w./+-])?")
_QUOTED = re.compile(r"""["'\[{]""")


def as_typed(value: Any) -> str:
    """`3e-05`, `q_proj, v_proj`, `power: 2.0, name: "x, y"`; empty for nothing."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    if isinstance(value, (list, tuple)):
        return ", ".join(as_typed(item) for item in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{_entry(key)}: {_entry(item)}" for key, item in value.items())
    return str(value)


def _entry(value: Any) -> str:
    """A key or a value of a mapping, quoted where it would mean something else bare."""
    bare = isinstance(value, str) and _BARE.fullmatch(value) and parse_value(value) == value
    return value if bare else json.dumps(value, ensure_ascii=False)


def entries(text: str, *, of_text: bool = False) -> dict[str, Any] | None:
    """`a: 1, b: true` as a mapping, braces around it or not; None where it is none. `of_text` keeps bare values texts."""
    inner = text[1:-1].strip() if text.startswith("{") and text.endswith("}") else text
    if _QUOTED.search(inner):
        parsed = parse_value(f"{{{inner}}}")
        return parsed if isinstance(parsed, dict) and all(isinstance(key, str) for key in parsed) else None
    pairs = [part.partition(":") for part in inner.split(",") if part.strip()]
    if any(not colon or not key.strip() for key, colon, _ in pairs):
        return None
    return {key.strip(): value.strip() if of_text else _scalar(value.strip()) for key, _, value in pairs}


def _scalar(word: str) -> Any:
    """A bare value: a truth, a number or nothing where YAML reads one, else the text."""
    parsed = parse_value(word)
    return word if isinstance(parsed, (list, dict, str)) or (parsed is None and not word) else parsed
