"""What the find box brings: settings by their name and the words of their help, and the terms of the trade.

A setting that the config has no row for now (another adapter's, another method's) is found too, and says whose it is.
"""

from __future__ import annotations

from typing import Any

from engine.config.schema import FieldSpec, RunConfig, fields
from engine.config.steps import step_of_path
from engine.config.terms import TERMS

MOST = 12


def found(config: RunConfig, text: str) -> list[dict[str, Any]]:
    """Hits that hold all words, names before helps and the config's own settings first; `about` tells what has no row."""
    words = text.lower().split()
    if not words:
        return []
    hits = []
    for spec in fields:
        place = f"{spec.path} {spec.title}".lower()
        if all(word in f"{place} {spec.help.lower()}" for word in words):
            hits.append((_rank(words, place), not spec.applies(config), _setting(spec, config)))
    for term, meaning in TERMS.items():
        if all(word in f"{term} {meaning}".lower() for word in words):
            hits.append((_rank(words, term.lower()), False, _hit(term, "", "a term", [meaning])))
    return [hit for *_, hit in sorted(hits, key=lambda entry: entry[:2])][:MOST]


def _rank(words: list[str], place: str) -> int:
    return 0 if all(word in place for word in words) else 1


def _setting(spec: FieldSpec, config: RunConfig) -> dict[str, Any]:
    if spec.applies(config):
        return _hit(spec.title, spec.path, "", []) | {"step": step_of_path(spec.path)}
    whose = f"only with {spec.section} {' or '.join(spec.kinds)}"
    return _hit(spec.title, spec.path, whose, [spec.help, f"{spec.path}, {whose}"])


def _hit(title: str, path: str, whose: str, about: list[str]) -> dict[str, Any]:
    return {"title": title, "path": path, "whose": whose, "about": about}
