"""Findings: what is wrong or odd about a config, as data, and the one place that words them.

The form is `<dotted path>: must be <rule>; got <value>. <what to do>.` A finding may carry a fix: settings to write and
to remove, which a frontend applies by one key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.errors import redact, visible, without_secrets

Severity = Literal["error", "warning", "hint"]
RANK: dict[str, int] = {"error": 0, "warning": 1, "hint": 2}
_LONGEST = 60


@dataclass(frozen=True, slots=True)
class Fix:
    """A change that mends a finding: first `unset` is removed, then `set` is written."""

    label: str
    set: Mapping[str, Any] = field(default_factory=dict)
    unset: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The fix as plain data."""
        kept = {path: without_secrets(value) if isinstance(value, str) else value for path, value in self.set.items()}
        return {"label": redact(self.label), "set": kept, "unset": list(self.unset)}


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem: where, how bad, which rule says so, the sentence, and what would mend it."""

    path: str
    severity: Severity
    rule: str
    message: str
    fix: Fix | None = None
    todo: str = ""
    """Its last sentence, where it has one of its own: why, or what to do."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", without_secrets(self.message))

    @property
    def text(self) -> str:
        """The message without its path, for places that show the path already."""
        return self.message.removeprefix(f"{visible(self.path)}: ")

    def as_json(self) -> dict[str, Any]:
        """The finding as `check --json` prints it."""
        return {
            "path": self.path,
            "severity": self.severity,
            "rule": self.rule,
            "message": redact(self.message),
            "fix": self.fix.as_json() if self.fix else None,
        }


def shown(value: Any) -> str:
    """A value as a person would write it in the file, short and safe for a terminal."""
    if value is None:
        return "nothing"
    if value is True or value is False:
        return str(value).lower()
    if isinstance(value, str):
        text = redact(value) if value.startswith("/") else value if value.strip() else f"'{value}'"
    elif isinstance(value, float):
        text = f"{value:g}" if abs(value) < 1e15 else repr(value)
    elif isinstance(value, int):
        text = str(value) if abs(value) < 10**40 else f"a number of about {value.bit_length() * 3 // 10} digits"
    elif isinstance(value, Mapping):
        text = "{" + ", ".join(f"{key}: {shown(item)}" for key, item in list(value.items())[:4]) + "}"
        text = text if 0 < len(value) <= 4 else f"{len(value)} settings" if value else "no settings"
    elif isinstance(value, (list, tuple)):
        text = (
            "a list of " + str(len(value)) if len(value) > 4 else "[" + ", ".join(shown(item) for item in value) + "]"
        )
    else:
        text = str(value)
    # before the cut: half a secret is not known for one
    text = visible(without_secrets(text[: 100 * _LONGEST])[: 4 * _LONGEST])
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def must(
    path: str,
    rule: str,
    got: Any,
    todo: str,
    *,
    severity: Severity = "error",
    fix: Fix | None = None,
    name: str = "",
) -> Finding:
    """The finding `<path>: must be <rule>; got <got>. <todo>.`; the rule's name is filled in by whoever runs it."""
    where = visible(path) if path else "the file"
    return Finding(path, severity, name, f"{where}: must be {rule}; got {shown(got)}. {todo}", fix, todo)


def notice(path: str, sentence: str, *, severity: Severity = "warning", fix: Fix | None = None) -> Finding:
    """A finding about what will happen rather than about one value: `<path>: <sentence>`."""
    return Finding(path, severity, "", f"{path}: {sentence}", fix)
