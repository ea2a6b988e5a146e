"""The one gate between the commands and the terminal: whatever is printed passes here, and nothing gets by raw.

Owns how text, styles, the line that is rewritten in place, JSON and errors leave a command. Text is made visible here and
style is given beside it, so no call has to think of what stands in a name, a row or a message from outside. One decision
worth knowing: on a terminal a sentence that names a command (`workbench runs`) names it as it can be called from where
the person stands; in a pipe or a log, which are read elsewhere, it keeps its plain name.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import click

from engine.errors import WorkbenchError, visible
from workbench.calling import program

_NAMED = re.compile(r"`workbench(?=[ `])")
_WORD = re.compile(r"(?:[^ `]|`[^`]*`|`)+")
_REWRITE = "\r\x1b[2K"


class ConfigRefused(WorkbenchError):
    """A config with errors was to be used; `findings` are those errors, for the document of `--json`."""

    def __init__(self, message: str, hint: str, findings: list[dict[str, Any]]) -> None:
        super().__init__(message, hint)
        self.findings = findings


class Styled(NamedTuple):
    """A text and how it looks where the output is a terminal: `fg`, `bold` and the like of `click.style`."""

    text: str
    style: Mapping[str, Any]


def styled(text: str, **look: Any) -> Styled:
    """A text with a look."""
    return Styled(text, look)


def safe(text: str, *, lines: bool = False, terminal: bool = False) -> str:
    """`text` as it may be printed; with `terminal` its commands are called as they can be from here."""
    shown = visible(text, lines=lines)
    return _NAMED.sub("`" + program(), shown) if terminal and "`workbench" in shown else shown


def as_called(command: str, err: bool = False) -> str:
    """A command that begins with `workbench` as it can be called from here, where that is printed to a terminal."""
    return program() + command.removeprefix("workbench") if _is_terminal(err) else command


def echo(*parts: str | Styled, err: bool = False, lines: bool = False, hang: int | None = None) -> None:
    """Print one line of parts. With `lines` newlines and tabs within them are kept. With `hang`, which is for sentences, a terminal
    gets it in lines broken between words, the later ones indented by so much; a pipe gets one line."""
    live, looks = _is_terminal(err), coloured(err)
    shown = [part if isinstance(part, Styled) else Styled(part, {}) for part in parts]
    texts = [safe(part.text, lines=lines, terminal=live) for part in shown]
    if (width := terminal_width(err)) and hang is not None and not any("\n" in text for text in texts):
        texts = _folded(texts, width, hang)
    pairs = zip(texts, shown, strict=True)
    click.echo("".join(click.style(text, **part.style) if looks and text else text for text, part in pairs), err=err)


def _folded(texts: list[str], width: int, hang: int) -> list[str]:
    """The texts of one line with breaks between its words. What stands in backticks stays whole, so that it can be copied."""
    from rich.cells import cell_len

    whole, begin, indent, breaks = "".join(texts), 0, 0, set[int]()
    for word in _WORD.finditer(whole):
        follows = whole[begin : word.start()].strip() and whole[word.start() - 1] == " "
        if follows and indent + cell_len(whole[begin : word.end()]) > width:
            breaks.add(word.start() - 1)
            begin, indent = word.start(), hang
    folded, at = list[str](), 0
    for text in texts:
        folded.append(
            "".join(f"\n{' ' * hang}" if place in breaks else letter for place, letter in enumerate(text, at))
        )
        at += len(text)
    return folded


def terminal_width(err: bool = False) -> int | None:
    """How wide the terminal is; None where the output is none."""
    if not _is_terminal(err):
        return None
    if not os.environ.get("COLUMNS"):
        with contextlib.suppress(OSError, ValueError):  # shutil asks standard output alone, which may be a file
            if width := os.get_terminal_size((sys.stderr if err else sys.stdout).fileno()).columns:
                return width
    return shutil.get_terminal_size().columns


def columns(rows: Sequence[Sequence[str]], widest: int | None = None) -> list[str]:
    """Rows of cells as lines, each column as wide as its widest cell, at most `widest`; what is wider pushes the rest on."""
    widths = [min(widest or 1 << 30, max(map(len, column))) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def coloured(err: bool = False) -> bool:
    """Whether looks are shown: on a terminal that has them, unless NO_COLOR says no."""
    return _is_terminal(err) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") not in ("dumb", "unknown")


def print_json(value: Any) -> None:
    """Print one JSON document on standard output. A number that is not finite is null, as JSON has none."""
    import json  # for machines alone

    try:
        text = json.dumps(value, default=str, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), default=str, allow_nan=False)
    click.echo(text.replace("\x7f", "\\u007f"))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


# -- the line that is rewritten in place -------------------------------------------------------------------------------


def rewrite(text: str) -> None:
    """Show `text` over the line before, cut to the window; only where standard error is a terminal."""
    if _is_terminal(True):
        from rich.cells import set_cell_size

        shown, width = safe(text), (terminal_width(err=True) or 80) - 1
        click.echo(_REWRITE + set_cell_size(shown, width).rstrip(), nl=False, err=True)


def on_stderr(state: Mapping[str, Any]) -> None:
    """Show the progress of a long task, `what: done of total`, over the line before."""
    from engine.figures import doing  # not for `--help`

    rewrite(doing(state))


def clear() -> None:
    """Take that line away."""
    if _is_terminal(True):
        click.echo(_REWRITE, nl=False, err=True)


def _is_terminal(err: bool) -> bool:
    stream = sys.stderr if err else sys.stdout
    return stream is not None and stream.isatty()


# -- errors ------------------------------------------------------------------------------------------------------------


def refuse(problem: WorkbenchError, usage: str = "") -> None:
    """The error on standard error: how the command is called where the call was wrong, the sentence, the way out."""
    if usage:
        echo(usage, err=True, lines=True)
    echo(f"Error: {problem.message}", err=True, hang=2)
    if problem.hint:
        echo(f"  {problem.hint}", err=True, hang=2)


def document(problem: WorkbenchError) -> None:
    """The error as the JSON document that every command with `--json` ends on when it has no answer."""
    error = {"message": problem.message, "hint": problem.hint, "code": problem.exit_code}
    findings = {"findings": problem.findings} if isinstance(problem, ConfigRefused) else {}
    print_json({"ok": False, "error": error, **findings})
