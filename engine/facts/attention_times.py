"""What attention over the documents of a pack took on this machine, by each implementation that is installed.

Kept beside the compiler's waits and read as they are. Entries are known by what decides the times: the card, the versions of
the libraries and of the packages that bring attention, heads and their width, the number format, the tokens of a batch and
the usual length of a document, the last two rounded to powers of two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.config.facts import DataFacts, ModelFacts
from engine.config.tree import RunConfig
from engine.facts import compiler_waits
from engine.hardware import installed

FILE = "workbench_attention.json"
MOST = 200
"""Shapes that are kept, the newest of them."""
LARGEST = 32_768
"""Tokens of a batch that are timed at most."""
_VERSIONS = ("torch", "transformers", "flash-attn", "flash-attn-3", "flash-attn-4", "nvidia-cudnn-frontend")


def place() -> Path:
    """The file, in the folder of torch's compiler that a run started from here has."""
    return compiler_waits.place().with_name(FILE)


def shape(config: RunConfig, data: DataFacts | None) -> tuple[int, int]:
    """Tokens of a packed batch, and of a document in it: the median of what was counted, else a quarter of a row."""
    row = config.data.max_length or 1024
    lengths = sorted(data.lengths) if data is not None and data.lengths else []
    usual = lengths[len(lengths) // 2] if lengths else row // 4
    tokens = min(config.optim.per_device_train_batch_size * row, LARGEST)
    return _power(tokens), _power(min(max(usual, 16), tokens))


def key(config: RunConfig, model: ModelFacts | None, data: DataFacts | None, card: str) -> str | None:
    """What the times of this run's attention are known by; None for a model whose heads are not known."""
    if model is None or not (model.heads and model.head_dim):
        return None
    tokens, length = shape(config, data)
    heads = f"{model.heads} and {model.kv_heads or model.heads} heads of {model.head_dim}"
    versions = (f"{name} {installed(name) or 'none'}" for name in _VERSIONS)
    return ", ".join((card, *versions, heads, config.model.dtype, f"{tokens} tokens", f"documents of {length}"))


def known(name: str | None, file: Path | None = None) -> dict[str, float]:
    """Milliseconds both ways by the implementation's name; empty where nothing was measured."""
    return {} if name is None else _read(file or place()).get(name, {})


def keep(name: str, times: Mapping[str, float], file: Path | None = None) -> None:
    """Keeps what was measured; a run that cannot write it goes on."""
    file = file or place()
    entries = {**_read(file), name: dict(times)}
    compiler_waits.write(file, dict(list(entries.items())[-MOST:]))


def _read(file: Path) -> dict[str, dict[str, float]]:
    found = compiler_waits.read(file)
    return {name: entry for name, entry in found.items() if _is_entry(entry)}


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or not entry:
        return False
    return all(type(time) in (int, float) and math.isfinite(time) and time > 0 for time in entry.values())


def _power(number: int) -> int:
    return 2 ** max(0, round(math.log2(max(number, 1))))
