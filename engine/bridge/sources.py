"""What the tools' sources have in common: splits with a share, names of readers where a path should stand, and
reward functions by the files of their modules."""

from __future__ import annotations

import re
from typing import Any

from engine.bridge.keys import Answer, File, changed, mapped, unsupported

SPLIT_OF_FILE = "A file has no splits."
READERS = ("json", "csv", "parquet", "arrow", "text")
"""Names under which the package datasets reads files; such a source names its rows under data_files."""
_SLICE = re.compile(r"(\w+)\[:(\d+)(%?)\]")


def reward_function(name: str, file: File) -> str:
    """`file.py:function` for `module.function`; empty where that file is not there."""
    module, _, function = name.rpartition(".")
    there = file.resolve_path(module.replace(".", "/") + ".py") if module else None
    return f"{file.from_out(there)}:{function}" if there is not None else ""


def named_split(split: str, rows: str, value: Any) -> Answer:
    """A split, perhaps with the first so many rows of it."""
    text = str(value)
    if text.replace("_", "").isalnum():
        return mapped({split: text})
    match = _SLICE.fullmatch(text)
    if match is None:
        return unsupported("A source has a split and takes its first rows with `rows`; other shares have no setting.")
    name, number, percent = match.groups()
    if percent:
        return changed({split: name}, "All rows of the split are taken: `rows` takes the first so many, not a share.")
    return mapped({split: name, rows: int(number)})
