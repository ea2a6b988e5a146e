"""The schema's front door: RunConfig, the tree of settings, reading, and what `auto` becomes."""

from __future__ import annotations

from engine.config.defaults import Effective, effective, resolved
from engine.config.facts import Facts
from engine.config.reading import Reading, read
from engine.config.tree import SECTIONS, VERSION, Bounds, FieldSpec, RunConfig, fields, fields_of

__all__ = [
    "SECTIONS",
    "VERSION",
    "Bounds",
    "Effective",
    "Facts",
    "FieldSpec",
    "Reading",
    "RunConfig",
    "effective",
    "fields",
    "fields_of",
    "read",
    "resolved",
]
