"""From a setting and a config to a row of the form: how a value is written, which choices it has, what is under it.

A loop over `FieldSpec` makes every row; nothing here knows a particular setting.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from engine.config.data import DataSource
from engine.config.files import short_path
from engine.config.findings import Finding
from engine.config.section import Section
from engine.config.text_values import as_typed
from engine.config.tree import FieldSpec, RunConfig
from engine.planning.auto import Effective
from workbench.panels.form import Row
from workbench.panels.paint import Part, clean

RANK = {"error": 0, "warning": 1, "hint": 2}
NOTE_STYLES = {"error": "bad", "warning": "warn", "hint": "hint"}
_EMPTY = re.compile(r"Empty means (?:that )?([^.,;:]+)")
COMPOUND = ("list", "mapping", "sources", "prompts")


def row_of(
    spec: FieldSpec,
    config: RunConfig,
    *,
    effective: Mapping[str, Effective],
    findings: Sequence[Finding],
    given: bool,
    raw: Any = None,
    invalid: bool = False,
) -> Row:
    """The row of one setting; `raw` is what was written where it could not be read."""
    mine = findings_at(spec.path, findings)
    notes = tuple(
        (clean(finding.text) + (f"  [f] {finding.fix.label}" if finding.fix else ""), NOTE_STYLES[finding.severity])
        for finding in mine
    )
    if invalid:
        value: tuple[Part, ...] = (
            (clean(raw if not isinstance(raw, (list, dict)) else json.dumps(raw, default=str)), "bad"),
        )
    else:
        value = value_parts(spec, spec.value(config), effective.get(spec.path), given)
    return Row(
        key=spec.path,
        label=spec.title,
        value=value,
        mark=mine[0].severity if mine else "",
        notes=notes,
        short="" if invalid else short_text(spec, spec.value(config), effective.get(spec.path)),
        tail="▾" if spec.control == "choice" else "›" if spec.control in COMPOUND else "",
    )


def findings_at(path: str, findings: Sequence[Finding]) -> list[Finding]:
    """The findings of a setting and of what is inside it, the gravest first."""
    mine = [finding for finding in findings if finding.path == path or finding.path.startswith(path + ".")]
    return sorted(mine, key=lambda finding: RANK[finding.severity])


def value_parts(spec: FieldSpec, value: Any, effective: Effective | None, given: bool) -> tuple[Part, ...]:
    """A value as the form shows it: in words, with its unit, `auto -> 1e-5` where it is resolved."""
    style = "given" if given else "value"
    if value == "auto" and spec.auto:
        if effective is None or effective.effective == "auto":
            return (("auto", style),)
        return (("auto", style), (" -> ", "dim"), (format_value(spec, effective.effective), "value"))
    if value in (None, "", [], {}) and not isinstance(value, (bool, int, float)):
        return (("missing", "warn"),) if spec.required else ((when_empty(spec), "faint"),)
    parts: list[Part] = [(format_value(spec, value), style)]
    if spec.unit:
        parts.append((f" {unit_of(spec, value)}", "dim"))
    return tuple(parts)


def when_empty(spec: FieldSpec) -> str:
    """What stands for a value that is left empty: what that means, as the help says it, else `none`."""
    means = _EMPTY.search(spec.help)
    return clean(means[1]).replace("`", "") if means else "none"


def unit_of(spec: FieldSpec, value: Any) -> str:
    """The unit after this value: 1 step, 2 steps."""
    if value != 1 or isinstance(value, bool):
        return spec.unit
    return spec.unit.removesuffix("es") if spec.unit.endswith("ches") else spec.unit.removesuffix("s")


def format_value(spec: FieldSpec, value: Any) -> str:
    """One value as a person writes it."""
    if isinstance(value, bool):
        return spec.labels.get(str(value), "yes" if value else "no")
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 and spec.name != "seed" else str(value)
    if isinstance(value, str):
        return clean(spec.labels.get(value, short_path(value) if spec.control == "path" else value))
    if isinstance(value, Mapping):
        return clean(as_typed(value))
    if isinstance(value, (list, tuple)):
        if not value:
            return "none"
        first = entry_text(value[0]) if spec.control != "sources" else short_path(_path_of(value[0]))
        return (
            first
            if len(value) == 1
            else f"{first} +{len(value) - 1}"
            if spec.control != "list"
            else ", ".join(map(entry_text, value))
        )
    return clean(value)


def _path_of(entry: Any) -> str:
    return str(entry.get("path", "") if isinstance(entry, Mapping) else getattr(entry, "path", entry))


def short_text(spec: FieldSpec, value: Any, effective: Effective | None = None) -> str:
    """A choice in few words: what stands before the colon of its words, else the value itself; of `auto` what it is."""
    if value == "auto" and effective is not None:
        return f"-> {clean(effective.effective)}"
    words = spec.labels.get(str(value), "")
    if not isinstance(value, str) or not words:
        return ""
    return words.partition(": ")[0] if ": " in words else value


def entry_text(entry: Any) -> str:
    """One entry of a list: a source by its file and format, else the text itself."""
    if isinstance(entry, Section):
        entry = entry.model_dump(exclude_defaults=True)
    if isinstance(entry, Mapping):
        path = short_path(str(entry.get("path", "")))
        usual = DataSource().model_dump()  # the config of a run names all that is usual too
        rest = ", ".join(
            str(item) if key == "format" else f"{key} {item}"
            for key, item in entry.items()
            if key != "path" and item and item != usual.get(key)
        )
        return clean(f"{path} ({rest})" if rest else path)
    return clean(entry)


def options_of(spec: FieldSpec) -> list[tuple[Any, str]]:
    """The choices with their words, `auto` and nothing among them where they are allowed."""
    options: list[tuple[Any, str]] = [("auto", "auto")] if spec.auto else []
    for choice in spec.choices:
        if choice in spec.unsupported:
            continue
        words = format_value(spec, choice)
        named = words == str(choice) or isinstance(choice, bool) or ": " in words
        options.append((choice, words if named else f"{choice}: {words}"))
    if spec.nullable and None not in spec.choices:
        options.append((None, f"{when_empty(spec)} (default)" if spec.default is None else when_empty(spec)))
    return options
