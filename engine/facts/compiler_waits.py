"""How long compiled layers of a shape made a run wait on this machine, and what a step took with and without them.

Kept beside what the compiler itself keeps, so that who removes the one removes the other: a shape that is in the record was
compiled here, and most of its wait is saved the next time. Entries are known by what decides the code that is made: the
card, the versions of the libraries, the model's shape, adapter, quantization, method, packing, attention, and what of the layers
is computed again, since each tier is graphs of its own. What is not readable counts as not there, and a run that cannot write it
goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from engine.caches import compiled
from engine.config.facts import CompilerWait, ModelFacts
from engine.config.tree import RunConfig
from engine.hardware import installed

FILE = "workbench_waits.json"
FOLDER = "TORCHINDUCTOR_CACHE_DIR"
MOST = 200
"""Shapes that are kept, the newest of them."""
LARGEST = 1024**2
"""Bytes of a file that is read; `MOST` shapes are a tenth of it."""
_VERSIONS = ("torch", "triton", "transformers", "peft")


def place(environment: Mapping[str, str] = os.environ) -> Path:
    """The file, in the folder of torch's compiler that a run started from here has."""
    folder = environment.get(FOLDER)
    return (Path(folder) if folder else compiled("inductor", environment)) / FILE


def key(config: RunConfig, model: ModelFacts | None, card: str) -> str | None:
    """What the layers of this run are known by; None for a model whose shape is not known."""
    if model is None or not model.hidden_size:
        return None
    shape = (model.layers, model.hidden_size, model.intermediate_size, model.heads, model.kv_heads, model.head_dim)
    adapter = f"{config.adapter.kind} {config.adapter.r}" if config.adapter.kind == "lora" else config.adapter.kind
    # A batch's size is part of the code where rows are packed, and of what a step takes everywhere.
    # A method's batch has its own passes: a pair is two rows, and a reference may answer too.
    rows = f"{config.method.kind} {'packed' if config.data.packing else 'padded'}"
    rows += f" {config.optim.per_device_train_batch_size} x {config.data.max_length}"
    words = (card, *(f"{name} {installed(name)}" for name in _VERSIONS), model.model_type, "x".join(map(str, shape)))
    parts = (*words, adapter, config.model.dtype, config.model.quantization, rows)
    return ", ".join((*parts, *(f"{name} {value}" for name, value in _chosen(config).items())))


def _chosen(config: RunConfig) -> dict[str, object]:
    """What decides the code and may still be `auto` where a config is looked at before its launch, the last parts of a key."""
    asked = config.memory.gradient_checkpointing
    tier = "full" if asked is True else asked or "none"
    return {
        "attention": config.model.attention,
        "recompute": tier,
        "layers": config.memory.recompute_num_layers or "all",
    }


def known(config: RunConfig, model: ModelFacts | None, card: str, file: Path | None = None) -> CompilerWait | None:
    """What was measured here of such layers; None where they were never compiled. What is `auto` stands for what the last such
    run took, and plain layers are then those of the last run without a compiler, which may have taken another tier."""
    name = key(config, model, card)
    if name is None:
        return None
    wanted, undecided = (
        name.split(", "),
        [place for place, value in enumerate(_chosen(config).values()) if value == "auto"],
    )
    open_places = {len(wanted) - len(_chosen(config)) + place for place in undecided}
    found: CompilerWait | None = None
    for other, entry in _read(file or place()).items():  # the newest is the last
        parts = other.split(", ")
        if len(parts) != len(wanted):
            continue
        if all(mine == its or at in open_places for at, (mine, its) in enumerate(zip(wanted, parts, strict=True))):
            newest = CompilerWait(**entry)
            if found is not None and not newest.times:
                newest = replace(found, plain=newest.plain)
            elif found is not None and newest.plain is None:
                newest = replace(newest, plain=found.plain)
            found = newest
    return found


@dataclass
class Measured:
    """What one run has measured: None what it has not."""

    wait: float | None = None
    """Seconds of the first batch with compiled layers, over those of a batch."""
    plain: float | None = None
    """Seconds from batch to batch with plain layers."""
    step: float | None = None
    """The same with compiled ones."""


def keep(name: str, measured: Measured, file: Path | None = None) -> None:
    """Adds what a run has measured to what is known: its wait is the first one where none was before."""
    file = file or place()
    entries = _read(file)
    entry = entries.pop(name, {"first": measured.wait, "again": None, "plain": None, "step": None, "times": 0})
    if measured.wait is not None:
        if entry["times"]:
            entry["again"] = measured.wait
        entry["times"] += 1
    entry |= {what: value for what, value in asdict(measured).items() if what != "wait" and value is not None}
    entries[name] = entry
    write(file, dict(list(entries.items())[-MOST:]))


def write(file: Path, entries: Mapping[str, Any]) -> None:
    """Writes them whole; where that cannot be done, nothing."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        beside.write_text(json.dumps(entries, indent=1) + "\n", "utf-8")
        beside.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()


def _read(file: Path) -> dict[str, dict[str, Any]]:
    return {name: entry for name, entry in read(file).items() if _is_entry(entry)}


def read(file: Path) -> dict[str, Any]:
    """What a file of such entries holds, by their names; nothing where it cannot be read."""
    try:
        if not file.is_file() or file.stat().st_size > LARGEST:  # the folder may be one that others write into
            return {}
        found = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_entry(entry: Any) -> bool:
    names = set(CompilerWait.__dataclass_fields__)
    if not isinstance(entry, dict) or set(entry) != names or type(entry["times"]) is not int:
        return False
    if not 0 <= entry["times"] < 10**9:
        return False
    return all(value is None or _is_seconds(value) for name, value in entry.items() if name != "times")


def _is_seconds(value: Any) -> bool:
    """Neither what no clock measures nor a number that others cannot be divided by."""
    return type(value) in (int, float) and (value == 0 or 1e-6 < value < 1e6)
