"""What commands that take a config need to know: overrides, facts, the disk forecast."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from engine.config.facts import Facts
from engine.config.files import Document, absolute, overrides, parse_value, place_of, put
from engine.config.schema import RunConfig

# What is given beside the file takes the place of the file's other way to say how long a run is.
_LENGTHS = ("optim.max_steps", "optim.num_train_epochs")


def with_overrides(mapping: Mapping[str, Any], base: Path, pairs: Iterable[str]) -> dict[str, Any]:
    """The mapping with absolute paths: the file's own against its folder, the overrides' against the working directory."""
    complete = absolute(mapping, base)
    here, pairs = Path.cwd(), tuple(pairs)
    lengths = [path for path in _LENGTHS if path in {pair.partition("=")[0].strip() for pair in pairs}]
    if len(lengths) == 1 and isinstance(complete.get("optim"), dict):
        complete["optim"].pop(next(path for path in _LENGTHS if path not in lengths).partition(".")[2], None)
    for pair in pairs:
        overrides({}, [pair])  # says what is wrong with its form
        path, _, text = pair.partition("=")
        parts = path.strip().split(".")
        if len(parts) == 2:
            section, name = parts
            value = absolute(overrides({}, [pair]), here)[section][name]
        else:
            value = parse_value(text)
            if parts[-1] == "path" and isinstance(value, str):
                value = place_of(value, here)
        put(complete, path.strip(), value)
    return complete


def read_with(document: Document, base: Path, pairs: Iterable[str]) -> tuple[dict[str, Any], dict[str, int | None]]:
    """The mapping of a file with overrides, and the line of each place; what was overridden stands in no line.

    Without overrides the mapping is the file's own, so that messages name paths as they stand there.
    """
    lines: dict[str, int | None] = dict(document.lines)
    given = tuple(pairs)
    if not given:
        return document.mapping, lines
    complete = with_overrides(document.mapping, base, given)
    for pair in given:
        path = pair.partition("=")[0].strip()
        lines = {place: line for place, line in lines.items() if not place.startswith(f"{path}.")} | {path: None}
    return complete, lines


def facts_for(mapping: Mapping[str, Any]) -> Facts:
    """What is known without loading anything: this machine, the model's own files, a look at each source."""
    from engine.config.schema import read
    from engine.data.look import look_at

    return look_at(read(mapping).config)


def forecast_bytes(config: RunConfig, facts: Facts) -> int | None:
    """What the checkpoints of this run will take, where that is known."""
    from engine.memory.estimate import estimate

    return estimate(config, facts).checkpoints_bytes
