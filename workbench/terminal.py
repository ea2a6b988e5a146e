"""Is this terminal fit for the app, and which colours suit it: asked before anything heavy is imported.

Owns the checks and the words for an unfit terminal. Draws nothing. The app paints on standard error and reads standard
input, so both must be a terminal; a refusal is a usage error (exit 2) that names the plain command to use instead.
Standard library only.
"""

from __future__ import annotations

import fcntl
import functools
import locale
import os
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping

from engine.errors import UsageError, visible

PLAIN = (
    "Without the app: `workbench demo`, `workbench new -o my.yaml`, `workbench check my.yaml`, `workbench train my.yaml`,"
    " `workbench runs`."
)
PLAIN_CHAT = 'Without the app: `workbench chat RUN --prompt "..."` answers and exits.'
UNFIT = ("", "dumb", "unknown")
KITTY = ("xterm-kitty", "xterm-ghostty")  # terminals with Kitty's graphics and its placeholders
IMAGES = ("kitty", "sixel", "blocks", "none")
"""How an image can be drawn, as WORKBENCH_IMAGES names it: in pixels by one of two protocols, as half blocks, not at all."""


def require_terminal(environ: Mapping[str, str] = os.environ, *, plain: str = PLAIN) -> None:
    """Return if the app can run here.

    Raises: UsageError with the reason and `plain`, the commands that do without.
    """
    for stream, name, why in ((sys.stdin, "input", "reads keys from"), (sys.stderr, "error", "draws on")):
        if stream is None or not stream.isatty():
            raise UsageError(f"The app {why} standard {name}, and that is not a terminal here.", plain)
    term = environ.get("TERM", "")
    if term in UNFIT:
        raise UsageError(
            f"TERM is {term or 'not set'}: this terminal cannot move its cursor, which the app needs.", plain
        )
    if not speaks_unicode(environ):
        raise UsageError(
            f"The locale is {_spoken(environ) or locale.getencoding()}, and the app writes UTF-8.",
            "Set it for this call: `LC_ALL=C.UTF-8 workbench`. " + plain,
        )
    if (images := environ.get("WORKBENCH_IMAGES", "")) and images not in IMAGES:
        raise UsageError(f"WORKBENCH_IMAGES is {visible(images)!r}.", f"It is one of {', '.join(IMAGES)}, or not set.")


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


def shows_images(environ: Mapping[str, str] = os.environ) -> str:
    """Which of `IMAGES` this terminal shows: what WORKBENCH_IMAGES says, else what the terminal is known for.

    A terminal is not asked: its answer would arrive among the keys. Half blocks need 256 colours, and nothing else.
    """
    from workbench.panels.glyphs import ascii_only

    if (chosen := environ.get("WORKBENCH_IMAGES", "")) in IMAGES:
        return chosen
    if ascii_only() or few_colours(environ) or environ.get("NO_COLOR"):
        return "none"
    if in_tmux(environ):
        term, passes = _behind_tmux()
        return "kitty" if passes and term in KITTY else "blocks"
    program = environ.get("TERM_PROGRAM", "")
    if environ.get("TERM") in KITTY or program == "ghostty" or environ.get("KITTY_WINDOW_ID"):
        return "kitty" if _knows_placeholders() else "blocks"
    sixel = (
        environ.get("TERM", "").startswith(("foot", "mlterm", "contour"))
        or program in ("WezTerm", "iTerm.app")
        or environ.get("LC_TERMINAL") == "iTerm2"
        or environ.get("KONSOLE_VERSION", "0") >= "220400"
    )
    return "sixel" if sixel and cell_pixels() else "blocks"


def in_tmux(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether tmux stands between the app and the terminal."""
    return bool(environ.get("TMUX"))


@functools.cache
def _behind_tmux() -> tuple[str, bool]:
    """The name of the terminal that shows tmux, and whether tmux lets commands pass to it."""
    ask = ["tmux", "display-message", "-p", "#{client_termname} #{allow-passthrough}"]
    try:
        answer = subprocess.run(ask, capture_output=True, text=True, timeout=1, check=False).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        answer = []
    return (answer[0], answer[1] in ("1", "on", "all")) if len(answer) == 2 else ("", False)


@functools.cache
def _knows_placeholders() -> bool:
    """Whether Kitty is 0.28 or newer; another machine's is taken for one."""
    try:
        output = subprocess.run(["kitty", "--version"], capture_output=True, text=True, timeout=1, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return True
    version = re.search(r"(\d+)\.(\d+)", output)
    return version is None or (int(version[1]), int(version[2])) >= (0, 28)


def cell_pixels() -> tuple[int, int] | None:
    """Width and height of a cell in pixels, where the terminal tells them."""
    try:
        answer = fcntl.ioctl(sys.__stderr__.fileno() if sys.__stderr__ else 2, termios.TIOCGWINSZ, bytes(8))
    except (OSError, ValueError):
        return None
    rows, columns, width, height = struct.unpack("HHHH", answer)
    return (width // columns, height // rows) if rows and columns and width >= columns and height >= rows else None
