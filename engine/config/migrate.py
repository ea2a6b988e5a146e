"""Older config files, brought up to date: one function per schema version.

Version 1 is the first, so there is nothing to bring up yet. `MIGRATIONS[n]` takes a mapping of version n and gives one
of version n + 1; a file of a newer version is refused with a sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.config.tree import VERSION

MIGRATIONS: dict[int, Callable[[Mapping[str, Any]], Mapping[str, Any]]] = {}


def migrate(mapping: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The mapping in today's version, and a sentence where its version cannot be read (the mapping is then as it was)."""
    version = mapping.get("version", VERSION)
    if isinstance(version, str) and version.strip().isdecimal() and len(version) < 10:
        version = int(version)
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        return mapping, f"Write `version: {VERSION}` or leave it out."
    if version > VERSION:
        return mapping, "A newer workbench wrote this file: update the workbench to read it."
    for step in range(version, VERSION):
        mapping = MIGRATIONS[step](mapping)
    return mapping, ""
