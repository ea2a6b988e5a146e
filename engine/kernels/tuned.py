"""The tiles that were found fastest on a card, kept in a file of the user's cache.

One file per card name, capability and Triton version, so an upgrade or another card times anew; the kernel's own version
is part of each entry's name. Written whole under a lock and put in place in one step: processes that tune at once lose
nothing of each other, and a reader sees the old file or the new. A file that cannot be read counts as empty, one that
cannot be written costs the next run its timings and nothing else; `problem` says so for the receipt.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import platformdirs
import torch
from filelock import FileLock, Timeout

_WAIT = 10.0


@dataclass(frozen=True)
class Entry:
    """The tile taken for one key, and the milliseconds of every tile that was timed."""

    tile: tuple[int, ...]
    times: dict[tuple[int, ...], float]

    def as_json(self) -> dict[str, Any]:
        times = [[*tile, time] for tile, time in self.times.items() if math.isfinite(time)]
        return {"tile": list(self.tile), "times": times}

    @classmethod
    def read(cls, value: Any) -> Entry | None:
        """From a file that anyone may have written: None for what is no entry."""
        with suppress(TypeError, ValueError, KeyError, OverflowError):
            times = {_tile(each): float(time) for *each, time in value["times"]}
            if all(math.isfinite(time) for time in times.values()):
                return cls(_tile(value["tile"]), times)
        return None


def _tile(numbers: Any) -> tuple[int, ...]:
    if not isinstance(numbers, list) or any(type(number) is not int for number in numbers):
        raise ValueError("a tile is a list of whole numbers")
    return tuple(numbers)


class Kept:
    """The entries of one card."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.problem = ""

    @classmethod
    def of(cls, device: torch.device) -> Kept:
        """The file of this device; on one that is not CUDA, that of its type."""
        name, capability = device.type, ""
        if device.type == "cuda":
            name = torch.cuda.get_device_name(device)
            capability = "sm" + "".join(map(str, torch.cuda.get_device_capability(device)))
        with suppress(metadata.PackageNotFoundError):
            capability += f" triton{metadata.version('triton')}"
        return cls(folder() / (re.sub(r"[^A-Za-z0-9.]+", "-", f"{name} {capability}").strip("-") + ".json"))

    def find(self, name: str) -> Entry | None:
        return Entry.read(self._entries().get(name))

    def keep(self, name: str, entry: Entry) -> None:
        """Adds or replaces one entry; those that others wrote meanwhile stay."""
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(self.file.with_suffix(".lock"), timeout=_WAIT):
                entries = {**self._entries(), name: entry.as_json()}
                self._replace(json.dumps(entries, indent=1, sort_keys=True))
        except (OSError, Timeout) as problem:
            self.problem = f"not kept for later runs: {getattr(problem, 'strerror', None) or problem}"

    def _entries(self) -> dict[str, Any]:
        try:
            found = json.loads(self.file.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def _replace(self, text: str) -> None:
        number, temporary = tempfile.mkstemp(prefix=f".{self.file.stem}-", dir=self.file.parent)
        try:
            with os.fdopen(number, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.file)
        except BaseException:
            os.unlink(temporary)
            raise


def folder() -> Path:
    cache = os.environ.get("WORKBENCH_CACHE") or platformdirs.user_cache_dir("finetuning-workbench")
    return Path(cache).expanduser().absolute() / "kernels"
