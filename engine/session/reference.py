"""`python -m engine.session.reference`: docs/settings.md and docs/schema.json, generated from the schema.

Both are committed, and a test fails when they differ from what this writes. The page is a loop over the field specs, so
a setting without help or bounds is seen there at once.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from engine.config.coercion import expectation
from engine.config.findings import shown
from engine.config.glossary import TERMS
from engine.config.method import LEARNING_RATES
from engine.config.optimizers import Own
from engine.config.schema import pydantic_model
from engine.config.section import helps
from engine.config.tree import SECTIONS, FieldSpec, RunConfig, fields
from engine.session.explain import own_settings

DOCS = Path(__file__).resolve().parents[2] / "docs"


def json_schema() -> str:
    """The JSON schema of a config file, for editors."""
    schema = pydantic_model(RunConfig).model_json_schema()
    owners = {spec.owner for spec in fields} | {item.owner for spec in fields for item in spec.items}
    for owner in {*owners, *(model for models in SECTIONS.values() for model in models.values())}:
        for name, text in helps(owner).items():
            schema["$defs"][owner.__name__]["properties"][name]["description"] = text
    schema["$defs"]["Optim"]["allOf"] = [
        _own_settings(choice, spec, name, own)
        for choice, spec in (
            (fields.optim.optim, fields.optim.optim_args),
            (fields.optim.lr_scheduler_type, fields.optim.lr_scheduler_kwargs),
        )
        for name, own in own_settings(spec).items()
    ]
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "workbench config"
    schema["description"] = "A config of the fine-tuning workbench. Settings that are left out have their defaults."
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _own_settings(choice: FieldSpec, spec: FieldSpec, name: str, own: Mapping[str, Own]) -> dict[str, Any]:
    """What the mapping takes when this is the optimizer, or the schedule."""
    default = {"required": [choice.name]} if name != choice.default else {}
    known = {key: own_setting.as_json_schema() for key, own_setting in own.items()}
    return {
        "if": {"properties": {choice.name: {"const": name}}, **default},
        "then": {"properties": {spec.name: {"properties": known, "additionalProperties": False}}},
    }


def page() -> str:
    """The reference page: every setting with what it takes, its default, its help and its source."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield from (
        "# Settings",
        "",
        "Generated from the schema by `make docs`; edit the sections in `engine/config/`, not this page.",
        "`workbench explain NAME` shows the same in the terminal.",
        "",
        "A config holds only what differs from the defaults. `auto` becomes a value before launch: the review and",
        "`workbench check` show it, and the run stores the value itself.",
        "",
    )
    for section, models in SECTIONS.items():
        yield f"## {section}"
        yield ""
        for kind, model in models.items():
            prefix = f"**{kind}**: " if kind else ""
            yield prefix + " ".join((model.__doc__ or "").split())
            yield ""
        for spec in fields:
            if spec.section == section:
                yield from _setting(spec)
    yield from _rates()
    yield from ("## Words", "")
    for term in sorted(TERMS, key=str.lower):
        yield f"- **{term}**: {TERMS[term]}"


def _setting(spec: FieldSpec) -> Iterator[str]:
    yield f"### `{spec.path}`"
    yield ""
    yield spec.help
    yield ""
    takes = expectation(spec) + (f" ({spec.unit})" if spec.unit else "")
    rows: list[tuple[str, Any]] = [("takes", takes), ("default", f"`{shown(spec.default)}`")]
    for kind, other in spec.variants:
        takes = expectation(other) + (f" ({other.unit})" if other.unit else "")
        source = f" ({other.source})" if other.source else ""
        rows.append((f"with `{kind}`", f"{takes}; default `{shown(other.default)}`. {other.help}{source}"))
    if spec.kinds and spec.name != "kind":
        rows.append(("only with", f"`{spec.section}.kind: {' or '.join(spec.kinds)}`"))
    if spec.unsupported:
        rows.append(("not in this version", ", ".join(f"`{shown(value)}`" for value in spec.unsupported)))
    rows.append(("level", spec.level))
    if spec.source:
        rows.append(("source", spec.source))
    yield from (f"- {label}: {value}" for label, value in rows)
    for choice in spec.choices:
        if str(choice) in spec.labels:
            yield f"- `{shown(choice)}`: {spec.labels[str(choice)]}"
    for item in spec.items:
        yield f"- `{item.name}` ({expectation(item)}; default `{shown(item.default)}`): {item.help}"
    for name, settings in own_settings(spec).items():
        for key, own in settings.items():
            yield f"- `{name}`: `{key}` ({own.takes}; default `{shown(own.default)}`): {own.text}"
    yield ""


def _rates() -> Iterator[str]:
    yield from ("## Learning rates that `auto` takes", "", "| method | adapter | rate |", "| --- | --- | --- |")
    for (method, adapter), rate in LEARNING_RATES.items():
        yield f"| {method} | {adapter} | {rate:g} |"
    yield ""


def write(folder: Path = DOCS) -> None:
    """Write both files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.md").write_text(page(), encoding="utf-8")
    (folder / "schema.json").write_text(json_schema(), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write settings.md and schema.json, which every setting is in.")
    parser.add_argument(
        "folder", nargs="?", type=Path, default=DOCS, help="where to; docs/ of this checkout if not given"
    )
    write(parser.parse_args().folder)
