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
class StateStyle:
    """How one state of a run looks: a sign, its plain form, a word and the theme's colour for it."""

    glyph: str
    plain: str
    word: str
    colour: str


STATES: dict[str, StateStyle] = {
    "queued": StateStyle("…", ":", "queued", "$text-muted"),
    "starting": StateStyle("◌", "o", "starting", "$text-accent"),
    "running": StateStyle("▶", ">", "running", "$text-success"),
    "stopping": StateStyle("◧", "<", "stopping", "$text-warning"),
    "finished": StateStyle("✓", "+", "finished", "$text-success"),
    "stopped": StateStyle("■", "#", "stopped", "$text-warning"),
    "failed": StateStyle("✗", "x", "failed", "$text-error"),
    "lost": StateStyle("?", "?", "lost", "$text-error"),
}
UNKNOWN = StateStyle("·", ".", "unknown", "$text-muted")


@functools.cache
def ascii_only() -> bool:
    """True where this terminal is not known to show Unicode."""
    if os.environ.get("WORKBENCH_ASCII"):
        return True
    return "utf" not in (locale.getpreferredencoding(False) or "").lower().replace("-", "")


def style_of(state: str) -> StateStyle:
    """The look of a state; a state this version does not know is shown as unknown, never hidden."""
    return STATES.get(state, UNKNOWN)


def sign(state: str) -> str:
    """The sign of a state in this terminal."""
    glyph = style_of(state)
    return glyph.plain if ascii_only() else glyph.glyph
