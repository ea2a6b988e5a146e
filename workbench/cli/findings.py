"""Findings on a terminal: a mark and a word for the severity, the sentence, the fix below it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from engine.config.findings import Finding, shown
from engine.errors import redact
from workbench.cli.output import ConfigRefused, echo, styled

_MARKS = {"error": ("x", "red"), "warning": ("!", "yellow"), "hint": ("?", "cyan")}


def show(findings: Iterable[Finding], lines: Mapping[str, int | None], *, err: bool = False) -> None:
    """One line a finding, with its line in the file where that is known, and what would mend it."""
    for finding in findings:
        mark, colour = _MARKS[finding.severity]
        line = line_of(finding.path, lines)
        place = f" (line {line})" if line else ""
        echo(styled(f"{mark} {finding.severity}", fg=colour), f"  {redact(finding.message)}{place}", err=err, hang=9)
        if finding.fix:
            echo(f"         fix: {fix_text(finding)}", err=err, hang=14)


def require_no_errors(findings: Iterable[Finding], name: str, consequence: str) -> None:
    """Show the findings on stderr. Raises ConfigRefused, which says that `consequence`, where one is an error."""
    listed = list(findings)
    show(listed, {}, err=True)
    refuse_errors(listed, name, consequence)


def refuse_errors(findings: Iterable[Finding], name: str, consequence: str) -> None:
    """Raises ConfigRefused, which says that `consequence`, where a finding is an error."""
    listed = list(findings)
    errors = [finding for finding in listed if finding.severity == "error"]
    if errors:
        raise ConfigRefused(
            f"{name}: the config has {count_text(errors)}; {consequence}.",
            "Each stands above with its way out.",
            [finding.as_json() for finding in errors],
        )


def fix_text(finding: Finding) -> str:
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


def count_text(findings: Iterable[Finding]) -> str:
    """`1 error, 2 warnings`, or `nothing wrong`."""
    counts: dict[str, int] = {}
    for finding in findings:
        counts[finding.severity] = counts.get(finding.severity, 0) + 1
    parts = [f"{counts[name]} {name}{'s' if counts[name] > 1 else ''}" for name in _MARKS if name in counts]
    return ", ".join(parts) or "nothing wrong"
