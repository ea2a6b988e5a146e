"""A setting on its way to the browser and back: how it is shown, and what a control's raw value means.

A loop over `FieldSpec` serves every setting; nothing here knows a particular one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from engine.config.coercion import Uncoerced, coerce, expectation
from engine.config.findings import Finding
from engine.config.recipes import recipe_mapping
from engine.config.section import Section
from engine.config.steps import step_of_path
from engine.config.text_values import as_typed
from engine.config.tree import FieldSpec, RunConfig, fields
from engine.errors import UsageError, visible
from engine.planning.auto import Effective
from engine.rules import read
from engine.session.draft import Draft
from widgets.protocol import shown

CHOICE = "choice"


def control_of(spec: FieldSpec) -> str:
    """The control that the browser draws. A switch that can also be `auto` or empty is a choice of three."""
    if spec.control == CHOICE or (spec.control == "bool" and (spec.auto or spec.nullable or spec.choices)):
        return CHOICE
    return spec.control


def options(spec: FieldSpec) -> list[tuple[Any, str]]:
    """The choices with their words; those that this version refuses are left out."""
    labelled: list[tuple[Any, str]] = [("auto", "auto")] if spec.auto else []
    choices = spec.choices or ((True, False) if spec.control == "bool" else ())
    for choice in choices:
        if choice not in spec.unsupported:
            words = spec.label(choice)
            plain = words.startswith(str(choice)) or isinstance(choice, bool) or ": " in words
            labelled.append((choice, words if plain else f"{choice}: {words}"))
    if spec.nullable and None not in choices:
        labelled.append((None, "none"))
    return labelled


def spec_data(spec: FieldSpec) -> dict[str, Any]:
    """All that a view needs to draw and explain a setting."""
    control = control_of(spec)
    choices = options(spec) if control == CHOICE else []
    empty = spec.default in (None, "", [], {}) and not isinstance(spec.default, bool)
    return {
        "path": spec.path,
        "key": spec.name,
        "title": spec.title,
        "control": control,
        "choices": [choice for choice, _ in choices],
        "words": [visible(words) for _, words in choices],
        "unit": spec.unit,
        "level": spec.level,
        "help": spec.help.replace("`", ""),
        "limits": f"takes {expectation(spec)}",
        "default": "" if empty else visible(spec.label(spec.default)) if not spec.items else "",
        "source": spec.source,
        "parts": [spec_data(item) for item in spec.items],
    }


def format_value(spec: FieldSpec, value: Any) -> str:
    """A value in a sentence."""
    if control_of(spec) == "sources":
        return ", ".join(source[spec.items[0].name] for source in shown_value(spec, value)) or "none"
    return visible(as_typed(value)).replace("\n", " ")[:80] or "none"


def shown_value(spec: FieldSpec, value: Any) -> Any:
    """What the control shows: a truth, a choice, lines, entries, or the text with which typing begins."""
    control = control_of(spec)
    if control == "sources":
        return [_entry(spec, entry) for entry in value] if isinstance(value, list) else []
    if control == "prompts":
        return [visible(str(line)) for line in value] if isinstance(value, list) else []
    if control in ("bool", CHOICE) and (value is None or isinstance(value, (bool, int, float, str))):
        return value
    return as_typed(value)


def _entry(spec: FieldSpec, entry: Any) -> dict[str, Any]:
    """One source by its written settings, each as its own control shows it."""
    if isinstance(entry, Section):
        entry = entry.model_dump(exclude_defaults=True)
    if not isinstance(entry, Mapping):
        return {spec.items[0].name: str(entry)}
    known = {item.name: item for item in spec.items}
    return {
        str(key): shown_value(known[key], value) if key in known else as_typed(value) for key, value in entry.items()
    }


def parse_control(spec: FieldSpec, value: Any, now: Any) -> Any:
    """The plain value that a control's raw one stands for; `now` is what is written. Raises UsageError for a wrong kind."""
    control = control_of(spec)
    if control == "sources" and isinstance(value, list):
        written = now if isinstance(now, list) else []
        return [_parse_entry(spec, entry, written[at] if at < len(written) else {}) for at, entry in enumerate(value)]
    fits = {
        "bool": isinstance(value, bool),
        CHOICE: value is None or isinstance(value, (bool, int, float, str)),
        "prompts": isinstance(value, list) and all(isinstance(line, str) for line in value),
        "sources": False,
    }.get(control, isinstance(value, str))
    if not fits:
        raise UsageError(f"{spec.path}: must be {expectation(spec)}; got {type(value).__name__}.")
    return value


def _parse_entry(spec: FieldSpec, entry: Any, written: Any) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise UsageError(f"{spec.path}: each source must be settings; got {type(entry).__name__}.")
    known = {item.name: item for item in spec.items}
    before = written if isinstance(written, Mapping) else {}
    parsed: dict[str, Any] = {}
    for key, raw in entry.items():
        item = known.get(key)
        if item is None:
            if key in before:
                parsed[key] = before[key]
        elif key in before and raw == shown_value(item, before[key]):
            parsed[key] = before[key]
        else:
            value = coerce(item, parse_control(item, raw, before.get(key)))
            parsed[key] = raw if isinstance(value, Uncoerced) else value
    return parsed


class Settings:
    """The settings of a draft as a view draws them: what never changes of each travels once, under a number."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._specs: dict[FieldSpec, int] = {}
        self._origins: dict[str | None, RunConfig] = {}

    def shown(self, specs: Iterable[FieldSpec], becomes: Mapping[str, Effective]) -> list[dict[str, Any]]:
        """How each of these stands now."""
        draft, reading = self._draft, self._draft.reading
        troubled = {finding.path for finding in reading.findings}
        settings = []
        for spec in specs:
            inside = spec.path + "."
            broken = any(path == spec.path or path.startswith(inside) for path in reading.invalid)
            value = draft.value(spec.path) if broken else spec.value(reading.config)
            auto = becomes.get(spec.path) if value == "auto" else None
            settings.append(
                {
                    "spec": self._specs.setdefault(spec, len(self._specs)),
                    "value": shown_value(spec, value),
                    "given": spec.path in reading.given,
                    "back": self._way_back(spec, value),
                    "auto": visible(as_typed(auto.effective)) if auto is not None else "",
                    "why": visible(auto.reason) if auto is not None else "",
                    "finding": any(path == spec.path or path.startswith(inside) for path in troubled),
                }
            )
        return settings

    def since(self, known: int) -> list[list[Any]]:
        """Number and data of the settings that a view which has `known` of them lacks."""
        return [[number, spec_data(spec)] for spec, number in self._specs.items() if number >= known]

    def back(self, spec: FieldSpec) -> None:
        """The recipe's value where it gives one, else the default."""
        draft = self._draft
        original = Draft.new(draft.recipe).value(spec.path) if draft.recipe else None
        if original is not None and original != draft.value(spec.path):
            draft.set(spec.path, original)
        else:
            draft.unset(spec.path)

    def _way_back(self, spec: FieldSpec, value: Any) -> str:
        """Where the button beside a setting leads; nothing where the setting is as it was."""
        recipe = self._draft.recipe
        if recipe not in self._origins:
            self._origins[recipe] = read(recipe_mapping(recipe) if recipe else {}).config
        was = spec.value(self._origins[recipe])
        if was == value and isinstance(was, bool) == isinstance(value, bool):
            return ""
        return f"back to the {'recipe' if recipe else 'default'}: {format_value(spec, was)}"


def finding_data(finding: Finding) -> dict[str, Any]:
    """A finding with the setting that it stands at."""
    owner = fields.get(".".join(finding.path.split(".")[:2]))
    part = fields.get(finding.path)
    inside = f", {part.title.lower()}" if part is not None and owner is not None and part is not owner else ""
    return {
        "key": key_of(finding),
        "path": owner.path if owner is not None else finding.path,
        "step": step_of_path(finding.path),
        "title": owner.title + inside if owner is not None else visible(finding.path or "the file"),
        "severity": finding.severity,
        "message": shown(finding.text),
        "fix": visible(finding.fix.label) if finding.fix else "",
    }


def key_of(finding: Finding) -> str:
    """By which a view names a finding."""
    return f"{finding.path}|{finding.rule}|{finding.severity}"[:400]
