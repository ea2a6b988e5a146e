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
    hits = [each for each in findable(config) if words and each.holds(words)]
    hits.sort(key=lambda each: (not all(word in each.name for word in words), bool(each.path and each.whose)))
    return [_hit(each) for each in hits[:MOST]]


def _hit(each: Findable) -> dict[str, Any]:
    known: dict[str, Any] = {"title": each.title, "path": each.path, "whose": each.whose}
    if not each.path:
        return known | {"about": [each.help]}
    if each.whose:
        return known | {"about": [each.help, f"{each.path}, {each.whose}"]}
    return known | {"about": [], "step": step_of_path(each.path)}
