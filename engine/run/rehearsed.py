"""What rehearsals on this machine measured: kept in the cache folder beside the estimate they were measured against, so that its
error is known the next time. `engine.run.rehearsal` measures. Torch-free.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine import figures
from engine.caches import user_cache
from engine.config.facts import Facts
from engine.config.files import absolute, as_mapping
from engine.config.tree import RunConfig
from engine.planning.auto import resolved

MOST_KEPT = 1 << 18


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What a step of the longest rows took. Bytes, seconds, tokens; `estimated` is the formula's word on the same rows."""

    t: float
    machine: str
    model: str
    method: str
    memory_peak: int
    seconds_per_step: float
    rows: int
    tokens: int
    longest: int
    estimated: int | None = None
    memory_allocated: int | None = None
    """What of the peak was handed out; the rest are fragments of the allocator."""

    @property
    def error(self) -> float | None:
        """By which share the estimate lies above (+) or below (-) what was measured."""
        return self.estimated / self.memory_peak - 1 if self.estimated else None

    def summary(self) -> str:
        """The measurement in a sentence or two."""
        day = time.strftime("%Y-%m-%d", time.localtime(self.t))
        text = f"Rehearsed on {day}: {figures.size(self.memory_peak)} at the peak of a step of the longest rows "
        text += f"({self.longest:,} tokens), which took {self.seconds_per_step:.2g} s."
        if self.error is None:
            return text
        return f"{text} The formula gave {figures.size(self.estimated)}, {abs(self.error):.0%} too {self.side}."

    @property
    def side(self) -> str:
        """On which side of the measured bytes the formula lies: `high` or `low`."""
        return "high" if self.error is not None and self.error > 0 else "low"

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "error": round(self.error, 4) if self.error is not None else None}


def last(config: RunConfig, facts: Facts, base: str | os.PathLike[str] = ".") -> Rehearsal | None:
    """The newest kept rehearsal of this very config on this machine; `base` is the folder of the config's file."""
    try:
        lines = kept().read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return None
    key = _key(resolved(config, facts), facts, base)
    for line in (line for line in reversed(lines) if key in line):
        with contextlib.suppress(ValueError, TypeError):
            values = json.loads(line)
            if isinstance(values, dict) and values.pop("key", None) == key:
                values.pop("error", None)
                return Rehearsal(**values)
    return None


def kept() -> Path:
    """The file of all rehearsals on this machine, one JSON line each."""
    return user_cache() / "rehearsals.jsonl"


def _key(config: RunConfig, facts: Facts, base: str | os.PathLike[str] = ".") -> str:
    """What decides memory and time of a step, hashed: not where the run goes or how long it lasts."""
    mapping = absolute(as_mapping(config), base)
    mapping.pop("run", None)
    for name in ("eval", "val_set_size"):
        mapping.get("data", {}).pop(name, None)
    for name in ("learning_rate", "max_steps", "num_train_epochs", "lr_scheduler_type", "warmup_steps", "weight_decay"):
        mapping.get("optim", {}).pop(name, None)
    text = json.dumps([machine_name(facts), mapping], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def machine_name(facts: Facts) -> str:
    """Where a rehearsal was: the first card, or the processor."""
    machine = facts.machine
    if machine is None:
        return ""
    return machine.gpus[0].name if machine.gpus else f"CPU, {machine.cpu_count} cores"


def keep(config: RunConfig, facts: Facts, rehearsal: Rehearsal) -> None:
    """One line more; an old file that has grown too long begins anew. A cache that cannot be written is no failure."""
    line = json.dumps({"key": _key(config, facts), **rehearsal.as_json()}) + "\n"
    place = kept()
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.exists() and place.stat().st_size > MOST_KEPT:
            place.unlink()
        handle = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(handle, line.encode())
        finally:
            os.close(handle)
