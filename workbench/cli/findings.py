"""Findings on a terminal: a mark and a word for the severity, the sentence, the fix below it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import click

from engine.config.findings import Finding, shown
from engine.errors import visible

_MARKS = {"error": ("x", "red"), "warning": ("!", "yellow"), "hint": ("?", "cyan")}


def show(findings: Iterable[Finding], lines: Mapping[str, int | None], *, err: bool = False) -> None:
    """One line a finding, with its line in the file where that is known, and what would mend it."""
    for finding in findings:
        mark, colour = _MARKS[finding.severity]
        line = line_of(finding.path, lines)
        place = f" (line {line})" if line else ""
        head = click.style(f"{mark} {finding.severity}", fg=colour)
        click.echo(f"{head}  {visible(finding.message)}{place}", err=err)
        if finding.fix:
            click.echo(f"         fix: {visible(fix_in_words(finding))}", err=err)


def fix_in_words(finding: Finding) -> str:
    """The fix as the person would type it: settings with their values, and what is removed."""
    fix = finding.fix
    if fix is None:
        return ""
    written = [f"{path}: {shown(value)}" for path, value in fix.set.items()]
    gone = [f"without {path}" for path in fix.unset if path not in fix.set]
    return f"{fix.label}  ({', '.join([*written, *gone])})"


def line_of(path: str, lines: Mapping[str, int | None]) -> int | None:
    """The line where the setting, or the nearest thing above it, stands; none for what was given beside the file."""
    while path:
        if path in lines:
            return lines[path]
        path = path.rpartition(".")[0]
    return None


def count_in_words(findings: Iterable[Finding]) -> str:
    """`1 error, 2 warnings`, or `nothing wrong`."""
    counts: dict[str, int] = {}
    for finding in findings:
        counts[finding.severity] = counts.get(finding.severity, 0) + 1
    parts = [f"{counts[name]} {name}{'s' if counts[name] > 1 else ''}" for name in _MARKS if name in counts]
    return ", ".join(parts) or "nothing wrong"
