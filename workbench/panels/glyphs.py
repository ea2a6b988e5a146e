"""The few signs the app draws, each with a plain form for terminals that cannot show it.

A state is always a sign and a word, so that it reads without colour. `ascii_only()` decides once per process: a locale
that is not UTF-8, or WORKBENCH_ASCII set.
"""

from __future__ import annotations

import functools
import locale
import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Look:
    """How one state of a run looks: a sign, its plain form, a word and the theme's colour for it."""

    glyph: str
    plain: str
    word: str
    colour: str


STATES: dict[str, Look] = {
    "queued": Look("…", ":", "queued", "$text-muted"),
    "starting": Look("◌", "o", "starting", "$text-accent"),
    "running": Look("▶", ">", "running", "$text-success"),
    "stopping": Look("◧", "<", "stopping", "$text-warning"),
    "finished": Look("✓", "+", "finished", "$text-success"),
    "stopped": Look("■", "#", "stopped", "$text-warning"),
    "failed": Look("✗", "x", "failed", "$text-error"),
    "lost": Look("?", "?", "lost", "$text-error"),
}
UNKNOWN = Look("·", ".", "unknown", "$text-muted")


@functools.cache
def ascii_only() -> bool:
    """True where this terminal is not known to show Unicode."""
    if os.environ.get("WORKBENCH_ASCII"):
        return True
    return "utf" not in (locale.getpreferredencoding(False) or "").lower().replace("-", "")


def look(state: str) -> Look:
    """The look of a state; a state this version does not know is shown as unknown, never hidden."""
    return STATES.get(state, UNKNOWN)


def sign(state: str) -> str:
    """The sign of a state in this terminal."""
    glyph = look(state)
    return glyph.plain if ascii_only() else glyph.glyph
