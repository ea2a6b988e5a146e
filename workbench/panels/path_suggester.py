"""Completes a path as it is typed."""

from __future__ import annotations

import os
from pathlib import Path

from textual.suggester import Suggester


class PathSuggester(Suggester):
    """Completes a path from the folder it is in; looks at one folder, and at its first thousand names."""

    def __init__(self, base: Path) -> None:
        super().__init__(use_cache=False, case_sensitive=True)
        self._base = base

    async def get_suggestion(self, value: str) -> str | None:
        """The first file or folder that begins with what is typed."""
        head, _, tail = value.rpartition("/")
        folder = self._base / os.path.expanduser(head + "/" if head or value.startswith("/") else ".")
        try:
            with os.scandir(folder) as entries:
                names = sorted(
                    entry.name + ("/" if entry.is_dir() else "")
                    for _, entry in zip(range(1000), entries, strict=False)
                    if entry.name.startswith(tail) and (tail or not entry.name.startswith("."))
                )
        except OSError:
            return None
        if not names or not value:
            return None
        return value[: len(value) - len(tail)] + names[0]
