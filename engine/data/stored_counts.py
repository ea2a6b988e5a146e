"""Counts of rows as they were last made, stored beside the prepared data, so that every window knows them at once.

They are found again by everything that they hang on, without reading a row: the config's model and data, the files of
sources and tokenizer by size and date, and the versions of the libraries. Torch-free: looks at a config read them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.caches import user_cache
from engine.config.facts import DataFacts, ModelFacts, counting_limits
from engine.config.files import DATA_SUFFIXES, place_of
from engine.config.tree import RunConfig
from engine.hardware import installed

FORMAT = 4  # grows when the counts of an unchanged config would differ
MOST = 500
"""Configs whose counts are kept; the oldest go."""
_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "processor_config.json",
    "preprocessor_config.json",
)  # fmt: skip


def store_counts(config: RunConfig, base: str | Path, model: ModelFacts | None, answer: Mapping[str, Any]) -> None:
    """Keep what was counted over all rows of this config. A cache that cannot be written keeps nothing."""
    place = _place(config, Path(base), model)
    if place is None or (answer.get("problem") and not answer.get("read")):
        return
    known = {name: answer[name] for name in DataFacts.__dataclass_fields__ if answer.get(name) is not None}
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        for old in sorted(place.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)[: -MOST or None]:
            old.unlink(missing_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=place.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
            json.dump(known, file)
        os.replace(file.name, place)


def load_counts(config: RunConfig, base: str | Path, model: ModelFacts | None) -> DataFacts | None:
    """What was counted of this very config; None where nothing was, or something has changed since."""
    place = _place(config, Path(base), model)
    if place is None:
        return None
    try:
        return DataFacts.counted_from(json.loads(place.read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _place(config: RunConfig, base: Path, model: ModelFacts | None) -> Path | None:
    """The file of this config's counts; None where what they hang on cannot be told from here."""
    entries = [*config.data.train, *config.data.eval]
    sources = [_stamp(place_of(entry.path, base)) for entry in entries]
    if not config.data.train or model is None or model.missing or model.remote or None in sources:
        return None
    rows = [entry.model_dump() | {"path": place_of(entry.path, base)} for entry in entries]
    tokenizer = place_of(config.model.tokenizer, base) if config.model.tokenizer else ""
    folders = [Path(folder) for folder in (model.folder, tokenizer) if folder]
    templates = [each for each in (config.model.chat_template, *(entry.chat_template for entry in entries)) if each]
    hangs_on = {
        "format": FORMAT,
        "model": [place_of(config.model.name, base), config.model.revision, tokenizer],
        "method": config.method.kind,
        "rows": [rows, len(config.data.train), config.run.seed, config.data.val_set_size],
        "limits": counting_limits(config),
        "sources": sources,
        "tokenizer": [_stamp(str(folder / name)) for folder in folders for name in _TOKENIZER],
        "templates": [_stamp(place_of(each, base)) for each in templates],
        "versions": {package: installed(package) or "" for package in ("transformers", "tokenizers", "jinja2")},
    }
    key = hashlib.sha256(json.dumps(hangs_on, sort_keys=True, default=str).encode()).hexdigest()[:32]
    return user_cache() / "counts" / f"{key}.json"


def _stamp(path: str) -> tuple[int, int] | str | None:
    """Size and date of a file, the name of generated rows; None for what is neither, such as a data set on the hub."""
    if path.startswith("builtin/"):
        return path
    try:
        found = os.stat(path)
    except OSError:
        return None
    if Path(path).is_dir() and not path.lower().endswith(DATA_SUFFIXES):
        # A data set in a folder is whole or written anew: its own description changes with it.
        known = [each for pattern in ("*.json", "metadata.*") for each in Path(path).glob(pattern)]
        return max(map(_size_and_date, known), default=None)
    return found.st_size, found.st_mtime_ns


def _size_and_date(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns
