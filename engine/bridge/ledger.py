"""The ledger: what became of every key of another tool's config, as rows, as text and as a config with comments.

A row says what stood there, what stands here, and why where the two differ. Four things can become of a key: `mapped`
means the same here, `changed` says something else than there, `needless` asks for nothing that must be written, and
`unsupported` asks for what is not done here. Nothing is left out, and no secret is shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.config.files import as_yaml
from engine.config.findings import shown
from engine.errors import visible

Outcome = Literal["mapped", "changed", "needless", "unsupported"]
OUTCOMES: dict[Outcome, str] = {
    "mapped": "mapped",
    "changed": "changed",
    "needless": "not needed",
    "unsupported": "not supported",
}
"""What can become of a key, with its words."""
Origin = Literal["file", "default", "list"]
"""Where a row's value stands: in the file, nowhere (the tool's own default), or in the tool's list of data sets."""
_SECRET = re.compile(r"(?i)((hub|hf|ms|om|auth|access)_token|api_?key|secret|password)$")


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one key: its place in the other tool's file and its value, the settings here, and why."""

    key: str
    value: Any
    outcome: Outcome
    settings: Mapping[str, Any]
    reason: str = ""
    origin: Origin = "file"

    @property
    def there(self) -> str:
        """The value as it stood there, short; what must not be read is not shown."""
        if self.value is not None and _SECRET.search(self.key):
            return "(a secret)"
        return shown(self.value)

    @property
    def here(self) -> str:
        """The settings that it became, as a person would write them."""
        settings = {path: "left out" if value is None else shown(value) for path, value in self.settings.items()}
        return ", ".join(f"{path}: {value}" for path, value in settings.items())

    def as_json(self) -> dict[str, Any]:
        """The row as `import --json` prints it."""
        secret = self.value is not None and _SECRET.search(self.key)
        return {
            "key": self.key,
            "value": None if secret else self.value,
            "outcome": self.outcome,
            "settings": dict(self.settings),
            "reason": self.reason,
            "origin": self.origin,
        }


@dataclass(frozen=True, slots=True)
class Ledger:
    """All rows of one file, and the config that they make."""

    tool: str
    """Its name in commands: `axolotl`."""
    title: str
    """Its name in sentences: `Axolotl`."""
    source: str
    """The file, as a person named it."""
    rows: tuple[Row, ...]
    mapping: Mapping[str, Any] = field(default_factory=dict)
    """The config that they make, as a plain mapping: ours, or the tool's where ours was written for it."""
    opening: str = ""
    """The first sentence of the comments."""
    counted: str = "keys"
    """What the rows are about."""

    def of(self, outcome: Outcome, *, origin: Origin | None = None) -> list[Row]:
        """The rows with this outcome, of one origin or of all."""
        return [row for row in self.rows if row.outcome == outcome and origin in (None, row.origin)]

    def counts(self) -> dict[str, int]:
        """How many keys of the file became what; the tool's defaults and its list of data sets are counted apart."""
        counted: dict[str, int] = {name: len(self.of(name, origin="file")) for name in OUTCOMES}
        return {**counted, "defaults": sum(row.origin == "default" for row in self.rows)}

    def summary(self) -> str:
        """One sentence: how many keys there are and what became of them."""
        counts = self.counts()
        total = sum(counts[name] for name in OUTCOMES)
        parts = [f"{counts[name]} {words}" for name, words in OUTCOMES.items() if counts[name]]
        defaults = counts["defaults"]
        more = (
            f"; {defaults} default{'s' if defaults != 1 else ''} of {self.title} differ{'s' if defaults == 1 else ''}"
        )
        return f"{self.title}: {total} {self.counted}, {', '.join(parts)}{more if defaults else ''}."

    def by_outcome(self) -> list[tuple[str, list[Row]]]:
        """The rows under headings, the gravest first; the tool's defaults that are carried stand apart."""
        defaults = [row for row in self.rows if row.origin == "default" and row.outcome == "mapped"]
        carried = [row for row in self.of("mapped") if row.origin != "default"]
        sorts = [
            ("Not supported, and not in this config", self.of("unsupported")),
            ("Changed", self.of("changed")),
            (f"Defaults of {self.title} that differ from the workbench's", defaults),
            ("Mapped", carried),
            ("Not needed", self.of("needless")),
        ]
        return [(heading, rows) for heading, rows in sorts if rows]

    def grouped(self, rows: Iterable[Row] | None = None) -> Iterator[tuple[str, str, str, Row]]:
        """Rows for reading: key, value there, settings here, row; neighbours below one key with one answer are one."""
        waiting: list[Row] = []
        for row in self.rows if rows is None else rows:
            if waiting and not _together(waiting[-1], row):
                yield _as_one(waiting)
                waiting = []
            waiting.append(row)
        if waiting:
            yield _as_one(waiting)

    def text(self) -> str:
        """The config as YAML; comments name what was changed, what is not carried, and the tool's defaults."""
        lines = [f"# {_one_line(self.opening)} {self.summary()}"]
        for heading, rows in self.by_outcome():
            if heading in ("Mapped", "Not needed"):
                continue
            lines.append(f"# {heading}:")
            for key, there, here, row in self.grouped(rows):
                change = f" -> {_one_line(here)}" if here else ""
                lines.append(f"#   {_one_line(key)}: {_one_line(there)}{change}. {_one_line(row.reason)}".rstrip())
        return "\n".join(lines) + "\n" + as_yaml(self.mapping)

    def as_json(self) -> dict[str, Any]:
        """The ledger as plain data."""
        return {"tool": self.tool, "counts": self.counts(), "rows": [row.as_json() for row in self.rows]}


def _one_line(text: str) -> str:
    return " ".join(visible(text).split())


def _together(one: Row, other: Row) -> bool:
    """Whether two rows are better read as one: below one key, with nothing written and one reason."""
    top = one.key.partition(".")[0]
    return (
        top == other.key.partition(".")[0]
        and "." in one.key
        and not (one.settings or other.settings)
        and (one.outcome, one.reason, one.origin) == (other.outcome, other.reason, other.origin)
    )


def _as_one(rows: list[Row]) -> tuple[str, str, str, Row]:
    first = rows[0]
    if len(rows) == 1:
        return first.key, first.there, first.here, first
    stem = _stem([row.key for row in rows])
    return stem, f"{len(rows)} keys", "", first


def _stem(keys: list[str]) -> str:
    """What all keys begin with, whole parts of it."""
    parts = [key.split(".") for key in keys]
    common = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        common.append(level[0])
    return ".".join(common) or keys[0]
