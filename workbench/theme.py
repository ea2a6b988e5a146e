"""The app's colours: two themes of our own, and two for terminals of sixteen colours."""

from __future__ import annotations

from textual.theme import BUILTIN_THEMES, Theme

# Greys of little saturation: where a terminal has 256 colours they become its greys, not its navy, teal or lavender.
DARK = {
    "wb-dim": "#8b949e", "wb-faint": "#6a737e", "wb-line": "#2d333b", "wb-cursor": "#343b45", "wb-field": "#1c2025",
    "wb-hint": "#79a8c9", "wb-cursor-text": "#d7dce2",
}  # fmt: skip
LIGHT = {
    "wb-dim": "#5c6570", "wb-faint": "#7d8590", "wb-line": "#d3d8de", "wb-cursor": "#d8dce1", "wb-field": "#eff0f2",
    "wb-hint": "#3d6f94", "wb-cursor-text": "#23282e",
}  # fmt: skip
ANSI = {
    **BUILTIN_THEMES["ansi-dark"].variables,
    "wb-dim": "ansi_default", "wb-faint": "ansi_bright_black", "wb-line": "ansi_bright_black", "wb-cursor": "ansi_blue",
    "wb-field": "ansi_black", "wb-hint": "ansi_cyan", "wb-cursor-text": "ansi_bright_white",
}  # fmt: skip
ANSI_LIGHT = {
    **ANSI, **BUILTIN_THEMES["ansi-light"].variables, "wb-cursor": "ansi_cyan", "wb-field": "ansi_white",
    "wb-hint": "ansi_blue", "wb-cursor-text": "ansi_black",
}  # fmt: skip
THEMES = (
    Theme(
        "workbench-dark", primary="#6cb6ff", accent="#6cb6ff", foreground="#d7dce2", background="#14171b", surface="#14171b",
        panel="#1c2025", success="#7cc58b", warning="#e0b050", error="#f47b72", dark=True, variables=DARK,
    ),
    Theme(
        "workbench-light", primary="#0b5cad", accent="#0b5cad", foreground="#23282e", background="#fbfbfa",
        surface="#fbfbfa", panel="#eff0f2", success="#1a7f37", warning="#8a5a00", error="#b42318", dark=False, variables=LIGHT,
    ),
    Theme(
        "workbench-ansi-dark", primary="ansi_bright_blue", accent="ansi_bright_cyan", foreground="ansi_default",
        background="ansi_default", surface="ansi_default", panel="ansi_default", boost="ansi_default",
        success="ansi_green", warning="ansi_yellow", error="ansi_bright_red", dark=True, ansi=True, variables=ANSI,
    ),
    Theme(
        "workbench-ansi-light", primary="ansi_blue", accent="ansi_blue", foreground="ansi_default",
        background="ansi_default", surface="ansi_default", panel="ansi_default", boost="ansi_default",
        success="ansi_green", warning="ansi_magenta", error="ansi_red", dark=False, ansi=True, variables=ANSI_LIGHT,
    ),
)  # fmt: skip


def theme_name(ansi: bool, dark: bool) -> str:
    """The theme of ours for such a terminal."""
    return f"workbench-{'ansi-' if ansi else ''}{'dark' if dark else 'light'}"
