"""What rules say of settings that belong to one choice alone, as those of an optimizer or of a schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from engine.config.findings import Finding, must
from engine.config.optimizers import Own
from engine.errors import nearest


def own_settings(path: str, given: Mapping[str, Any], known: Mapping[str, Own], whose: str) -> Iterator[Finding]:
    """A finding for each key below `path` that is none of these, with the nearest, and for each value out of bounds."""
    for key, value in given.items():
        if key not in known:
            close = nearest(str(key), known)
            todo = f"Did you mean {close}?" if close else f"It takes {', '.join(known)}." if known else "Remove it."
            yield must(f"{path}.{key}", f"left out with {whose}, which does not use it", value, todo)
        elif not known[key].fits(value):
            yield must(f"{path}.{key}", known[key].takes, value, "Give such a value, or remove it.")
