"""Is this terminal fit for the app, and which colours suit it: asked before anything heavy is imported.

Owns the checks and the words for an unfit terminal. Draws nothing. The app paints on standard error and reads standard
input, so both must be a terminal; a refusal is a usage error (exit 2) that names the plain command to use instead.
Standard library only.
"""

from __future__ import annotations

import locale
import os
import sys
from collections.abc import Mapping

from engine.errors import UsageError

PLAIN = (
    "Without the app: `workbench demo`, `workbench new -o my.yaml`, `workbench check my.yaml`, `workbench train my.yaml`,"
    " `workbench runs`."
)
UNFIT = ("", "dumb", "unknown")


def require_terminal(environ: Mapping[str, str] = os.environ) -> None:
    """Return if the app can run here.

    Raises: UsageError with the reason and the plain commands.
    """
    for stream, name, why in ((sys.stdin, "input", "reads keys from"), (sys.stderr, "error", "draws on")):
        if stream is None or not stream.isatty():
            raise UsageError(f"The app {why} standard {name}, and that is not a terminal here.", PLAIN)
    term = environ.get("TERM", "")
    if term in UNFIT:
        raise UsageError(
            f"TERM is {term or 'not set'}: this terminal cannot move its cursor, which the app needs.", PLAIN
        )
    if not speaks_unicode(environ):
        raise UsageError(
            f"The locale is {_spoken(environ) or locale.getencoding()}, and the app writes UTF-8.",
            "Set it for this call: `LC_ALL=C.UTF-8 workbench`. " + PLAIN,
        )


def speaks_unicode(environ: Mapping[str, str] = os.environ) -> bool:
    """True where the locale says UTF-8: the environment's own words, because Python's UTF-8 mode hides LANG=C."""
    spoken = _spoken(environ)
    if environ.get("PYTHONUTF8") == "1" or environ.get("PYTHONIOENCODING", "").lower().startswith("utf"):
        return True
    if not spoken:  # nothing said: Python has already coerced the C locale where it could
        return "utf" in locale.getpreferredencoding(False).lower()
    return "utf" in spoken.lower()


def _spoken(environ: Mapping[str, str]) -> str:
    """The locale as the environment names it."""
    return environ.get("LC_ALL") or environ.get("LC_CTYPE") or environ.get("LANG") or ""


def settle_colour(environ: dict[str, str] | os._Environ[str] = os.environ) -> bool:
    """True when no colour is wanted; an empty NO_COLOR means nothing, as its convention says, and is removed."""
    if environ.get("NO_COLOR"):
        return True
    environ.pop("NO_COLOR", None)
    return False


def wants_light(environ: Mapping[str, str] = os.environ) -> bool:
    """Light or dark: what WORKBENCH_THEME says, else what the terminal says of its background, else dark."""
    chosen = environ.get("WORKBENCH_THEME", "").lower()
    if chosen in ("light", "dark"):
        return chosen == "light"
    return environ.get("COLORFGBG", "").rpartition(";")[2] in ("7", "15")


def few_colours(environ: Mapping[str, str] = os.environ) -> bool:
    """True where the terminal promises no more than 16 colours: then its own palette is used, not ours."""
    if environ.get("COLORTERM", "").lower() in ("truecolor", "24bit"):
        return False
    term = environ.get("TERM", "")
    return not any(word in term for word in ("256", "direct", "kitty", "ghostty", "alacritty", "wezterm", "foot"))
