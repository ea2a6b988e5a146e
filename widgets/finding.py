"""What the find box brings: settings by their name and the words of their help, and the terms of the trade."""

from __future__ import annotations

from typing import Any

from engine.config.steps import step_of_path
from engine.config.tree import RunConfig
from engine.session.explain import Findable, findable

MOST = 12


def found(config: RunConfig, text: str) -> list[dict[str, Any]]:
    """Hits that hold all words, names before helps and the config's own settings first; `about` tells what has no row."""
    words = text.lower().split()
    hits = [item for item in findable(config) if words and item.holds(words)]
    hits.sort(key=lambda item: (not all(word in item.name for word in words), bool(item.path and item.whose)))
    return [_hit(item) for item in hits[:MOST]]


def _hit(item: Findable) -> dict[str, Any]:
    known: dict[str, Any] = {"title": item.title, "path": item.path, "whose": item.whose}
    if not item.path:
        return known | {"about": [item.help]}
    if item.whose:
        return known | {"about": [item.help, f"{item.path}, {item.whose}"]}
    return known | {"about": [], "step": step_of_path(item.path)}
