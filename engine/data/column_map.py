"""What the first rows of a source say under a choice of columns: which parts its format has, and what stands in each.

For whoever picks the columns of a source: rows are read as training reads them, before any template. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from engine.config.data import PARTS
from engine.data.detect import CAREFUL, detect
from engine.data.formats import FORMATS, read_example
from engine.data.mapped import Rows
from engine.data.parts import Example, Message
from engine.errors import WorkbenchError, visible

SHOWN = 3
CLIP = 2000
"""Characters of one part of a row that are shown."""
SAMPLE = 80
"""Characters of a column that stand beside its name."""
_NAMES = {
    "pair": ("prompt", "completion", "rejected"),
    "preference": ("prompt", "chosen", "rejected"),
    "texts": ("anchor", "positive", "negative"),
    "prompt": ("prompt", "answer", ""),
}
"""What prompt and answers of an example are called, by its kind."""


def mapped(rows: Rows, names: Mapping[str, str], format_name: str | None, count: int = SHOWN) -> dict[str, Any]:
    """The columns of a source, the parts of its format with the column of each, and what the first rows then say."""
    found = detect(rows, names, format_name)
    first = found.example or {}
    known = FORMATS.get(found.format or "")
    parts = PARTS.get(found.format or "", ())
    required = known.required() if known is not None else []
    return {
        "columns": [[str(name), brief(value)] for name, value in first.items()],
        "format": found.format,
        "title": known.title if known is not None else "",
        "why": found.why,
        "parts": [
            {"name": part, "needed": part in required, "column": _source_column(part, found.columns, first)}
            for part in parts
        ],
        "rows": [_row(rows, index, found.format, found.columns) for index in range(count) if _there(rows, index)],
        "problem": found.problems[0] if found.format is None and found.problems else "",
    }


def _source_column(part: str, columns: Mapping[str, str], first: Mapping[str, Any]) -> str:
    """The column that a part is read from; empty where it is read from none."""
    column = columns.get(part, part)
    return column if part in columns or column in first else ""


def _there(rows: Rows, index: int) -> bool:
    try:
        rows.size(index)
    except IndexError:
        return False
    except WorkbenchError:
        return index < rows.known()
    return True


def _row(rows: Rows, index: int, format_name: str | None, columns: Mapping[str, str]) -> dict[str, Any]:
    """One row: what its parts say as `[label, text]`, or what is wrong with it."""
    shown: dict[str, Any] = {"index": index, "says": [], "problem": ""}
    if format_name is None:
        return shown | {"says": [["", rows.text(index, CLIP)]]}
    if rows.size(index) > CAREFUL:
        return shown | {"problem": f"a row of {rows.size(index) / 1e6:,.0f} MB is not shown here"}
    try:
        example = read_example(rows[index], format_name, columns)
    except WorkbenchError as problem:
        return shown | {"problem": f"{problem.message}. {problem.hint}".strip()}
    return shown | {"says": [[label, text[:CLIP]] for label, text in example_parts(example) if text]}


def example_parts(example: Example) -> Iterator[tuple[str, str]]:
    """What an example says, part by part: who says it or what it is, and the text."""
    if example.tools:
        yield "tools", ", ".join(_tool(tool) for tool in example.tools)
    yield from _turns(example.messages)
    yield "text", example.text
    values = (example.prompt, example.chosen, example.rejected)
    for name, value in zip(_NAMES.get(example.kind, ("prompt", "answer", "rejected")), values, strict=True):
        if isinstance(value, str):
            yield name, value
        else:
            yield from ((f"{name}: {label}", text) for label, text in _turns(value))
    verdicts = [*example.verdicts, *(True for _ in example.steps[len(example.verdicts) :])]
    for step, good in zip(example.steps, verdicts, strict=False):
        yield "good step" if good else "bad step", step
    if example.label is not None:
        yield "label", "a good answer" if example.label else "a bad answer"
    if example.score is not None:
        yield "score", f"{example.score:g}"
    if example.input_ids:
        yield "input_ids", f"{len(example.input_ids):,} tokens: {', '.join(map(str, example.input_ids[:20]))}"
    if example.images:
        yield "images", ", ".join(brief(image) for image in example.images)


def _turns(turns: list[Message]) -> Iterator[tuple[str, str]]:
    for turn in turns:
        role, content = str(turn["role"]), turn.get("content")
        yield f"{role}, thinking", str(turn.get("reasoning_content") or "")
        if isinstance(content, list):
            content = "".join(
                "[image]" if part.get("type") == "image" else str(part.get("text", "")) for part in content
            )
        yield role, str(content or "")
        for call in turn.get("tool_calls") or ():
            yield f"{role}, call", json.dumps(call.get("function", call), ensure_ascii=False, default=str)


def _tool(tool: Any) -> str:
    inner = tool.get("function", tool) if isinstance(tool, Mapping) else tool
    return str(inner.get("name", "a tool")) if isinstance(inner, Mapping) else str(inner)


def brief(value: Any) -> str:
    """The beginning of any value as one line."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return visible(text[:SAMPLE]) + ("…" if len(text) > SAMPLE else "")
