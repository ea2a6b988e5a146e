"""What `train` and `demo` need to know before they start: overrides, facts, the disk forecast."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from engine.config.facts import Facts
from engine.config.files import absolute, overrides, parse_value, place_of, put
from engine.config.schema import RunConfig


def with_overrides(mapping: Mapping[str, Any], base: Path, pairs: Iterable[str]) -> dict[str, Any]:
    """The mapping with absolute paths: the file's own against its folder, the overrides' against the working directory."""
    complete = absolute(mapping, base)
    here = Path.cwd()
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


def facts_for(mapping: Mapping[str, Any]) -> Facts:
    """What is known without loading anything: this machine, the model's own files, a look at each source."""
    from engine.config.schema import read
    from engine.data.look import look_at

    return look_at(read(mapping).config)


def forecast_bytes(config: RunConfig, facts: Facts) -> int | None:
    """What the checkpoints of this run will take, where that is known."""
    from engine.memory.estimate import estimate

    return estimate(config, facts).checkpoints_bytes
