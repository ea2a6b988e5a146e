"""The config files that were opened or saved last, kept for the next window: a convenience that nothing else depends on."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path

from engine.run.store import replace_file

MOST = 30
_LARGEST = 1 << 20


class Recent:
    """Paths and times, the newest first, in one small file."""

    def __init__(self, folder: Path) -> None:
        self._place = folder / "recent.json"

    def configs(self) -> list[tuple[Path, float]]:
        """The files that are still there, each with the time when it was last opened or saved here."""
        return [(path, when) for path, when in self._read() if path.is_file()]

    def note(self, path: str | os.PathLike[str]) -> None:
        """This file was opened or saved now. Where that cannot be written down, it is not."""
        mine = Path(os.path.abspath(path))
        kept = [(mine, time.time()), *(entry for entry in self._read() if entry[0] != mine)][:MOST]
        with contextlib.suppress(OSError):  # only the list at the next start is shorter
            self._place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            replace_file(self._place, json.dumps({"configs": [[str(path), when] for path, when in kept]}))

    def _read(self) -> list[tuple[Path, float]]:
        try:
            with open(self._place, "rb") as file:
                document = json.loads(file.read(_LARGEST))["configs"]
            return [(Path(path), float(when)) for path, when in document if isinstance(path, str) and "\0" not in path]
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return []


def with_sources(
    opened: Iterable[tuple[Path, float]], sources: Iterable[tuple[str, float]]
) -> list[tuple[Path, float]]:
    """Files that were opened and files that runs were started from, each once, the newest first; those that are gone left out."""
    newest: dict[Path, float] = {}
    for path, when in [*opened, *((Path(source), when) for source, when in sources if source)]:
        newest[path] = max(when, newest.get(path, 0.0))
    ordered = sorted(newest.items(), key=lambda entry: -entry[1])
    return [(path, when) for path, when in ordered[:MOST] if path.is_file()]
