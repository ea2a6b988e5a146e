"""A setting on its way to the browser and back: how it is shown, and what a control's raw value means.

A loop over `FieldSpec` serves every setting; nothing here knows a particular one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from engine.config.meaning import Unmeant, expectation, meaning
from engine.config.schema import FieldSpec
from engine.config.typed import as_typed
from engine.errors import UsageError, visible

CHOICE = "choice"


def control_of(spec: FieldSpec) -> str:
    """The control that the browser draws. A switch that can also be `auto` or empty is a choice of three."""
    if spec.control == CHOICE or (spec.control == "bool" and (spec.auto or spec.nullable or spec.choices)):
        return CHOICE
    return spec.control


def options(spec: FieldSpec) -> list[tuple[Any, str]]:
    """The choices with their words; those that this version refuses are left out."""
    found: list[tuple[Any, str]] = [("auto", "auto")] if spec.auto else []
    choices = spec.choices or ((True, False) if spec.control == "bool" else ())
    for choice in choices:
        if choice not in spec.later:
            words = spec.label(choice)
            plain = words.startswith(str(choice)) or isinstance(choice, bool) or ": " in words
            found.append((choice, words if plain else f"{choice}: {words}"))
    if spec.nullable and None not in choices:
        found.append((None, "none"))
    return found


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


def in_words(spec: FieldSpec, value: Any) -> str:
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
    if isinstance(entry, BaseModel):
        entry = entry.model_dump(exclude_defaults=True)
    if not isinstance(entry, Mapping):
        return {spec.items[0].name: str(entry)}
    known = {item.name: item for item in spec.items}
    return {
        str(key): shown_value(known[key], value) if key in known else as_typed(value) for key, value in entry.items()
    }


def meant(spec: FieldSpec, value: Any, now: Any) -> Any:
    """The plain value that a control's raw one stands for; `now` is what is written. Raises UsageError for a wrong kind."""
    control = control_of(spec)
    if control == "sources" and isinstance(value, list):
        written = now if isinstance(now, list) else []
        return [_meant_entry(spec, entry, written[at] if at < len(written) else {}) for at, entry in enumerate(value)]
    fits = {
        "bool": isinstance(value, bool),
        CHOICE: value is None or isinstance(value, (bool, int, float, str)),
        "prompts": isinstance(value, list) and all(isinstance(line, str) for line in value),
        "sources": False,
    }.get(control, isinstance(value, str))
    if not fits:
        raise UsageError(f"{spec.path}: must be {expectation(spec)}; got {type(value).__name__}.")
    return value


def _meant_entry(spec: FieldSpec, entry: Any, written: Any) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise UsageError(f"{spec.path}: each source must be settings; got {type(entry).__name__}.")
    known = {item.name: item for item in spec.items}
    before = written if isinstance(written, Mapping) else {}
    found: dict[str, Any] = {}
    for key, raw in entry.items():
        item = known.get(key)
        if item is None:
            if key in before:
                found[key] = before[key]
        elif key in before and raw == shown_value(item, before[key]):
            found[key] = before[key]
        else:
            value = meaning(item, meant(item, raw, before.get(key)))
            found[key] = raw if isinstance(value, Unmeant) else value
    return found
