"""`read`: a mapping in, a whole config and every finding out. It never raises for what a person wrote.

A bad value is replaced by its default and its path is marked invalid; rules that read an invalid setting are skipped.
Unknown keys are answered with the nearest setting, the right section, or our name for another tool's key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from engine.config.adapter import NoAdapter
from engine.config.data import FORMATS_LATER, DataSource
from engine.config.facts import Facts
from engine.config.findings import RANK, Finding, Fix, must, shown
from engine.config.meaning import Unmeant, expectation, fit, meaning
from engine.config.method import Sft
from engine.config.migrate import migrate
from engine.config.renames import CHANGES, INSTEAD, NAMES, translate
from engine.config.section import Section
from engine.config.tree import SECTIONS, VERSION, FieldSpec, RunConfig, fields
from engine.errors import nearest, visible


@dataclass(frozen=True, slots=True)
class Reading:
    """What was read: always a whole config; `invalid` and `given` are dotted paths."""

    config: RunConfig
    findings: tuple[Finding, ...]
    invalid: frozenset[str]
    given: frozenset[str]

    @property
    def ok(self) -> bool:
        """Whether nothing of severity error was found."""
        return not any(finding.severity == "error" for finding in self.findings)


def read(mapping: Mapping[str, Any] | None, facts: Facts | None = None) -> Reading:
    """The config that `mapping` describes, and all that is wrong with it at once."""
    reader = _Reader()
    config = reader.config(mapping if isinstance(mapping, Mapping) else {})
    if mapping is not None and not isinstance(mapping, Mapping):
        reader.findings.append(
            must(
                "",
                "settings by section, such as `model:` and `data:`",
                mapping,
                "Start from a recipe.",
                name="not-a-config",
            )
        )
    given = frozenset(reader.given)
    facts = dataclasses.replace(facts or Facts(), given=given)
    from engine.config.rules import run_rules  # here, because every rule imports the tree that `read` fills

    findings = [*reader.findings, *run_rules(config, facts, reader.invalid)]
    findings.sort(key=lambda finding: RANK[finding.severity])
    return Reading(config, tuple(findings), frozenset(reader.invalid), given)


class _Reader:
    """One reading: gathers findings, invalid paths and given paths while it goes through the sections."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.invalid: set[str] = set()
        self.given: set[str] = set()

    def config(self, mapping: Mapping[str, Any]) -> RunConfig:
        version = mapping.get("version", VERSION)
        mapping, problem = migrate(mapping)
        if problem:
            self._refuse("version", str(VERSION), version, problem, "version")
        sections: dict[str, Any] = {}
        for name in SECTIONS:
            sections[name] = self._section(name, mapping.get(name))
        for key, value in mapping.items():
            if key != "version" and key not in SECTIONS:
                self._unknown("", key, value)
        return RunConfig.model_construct(version=VERSION, **sections)

    def _refuse(
        self, path: str, rule: str, got: Any, todo: str, name: str, fix: Fix | None = None, marks: bool = True
    ) -> None:
        self.findings.append(must(path, rule, got, todo, fix=fix, name=name))
        if marks:
            self.invalid.add(path)

    def _section(self, name: str, raw: Any) -> Section:
        models = SECTIONS[name]
        if raw is None:
            raw = {}
        if not isinstance(raw, Mapping):
            self._whole_section(name, raw)
            raw = {}
        model, known_kind = self._model_of(name, models, raw)
        values: dict[str, Any] = {}
        for key, value in raw.items():
            path = f"{name}.{key}"
            if key == "kind" and "" not in models:
                self.given.add(path)
                continue
            spec = fields.get(path) if isinstance(key, str) else None
            if spec is None:
                self._unknown(name, key, value)
                continue
            self.given.add(path)
            if spec.variants:
                spec = spec.for_kind(model.model_fields["kind"].default)
            if key not in model.model_fields:
                if known_kind:
                    self._wrong_kind(spec, value, model)
                continue
            fitting = self._sources(spec, value) if spec.control == "sources" else fit(spec, value)
            if isinstance(fitting, Unmeant):
                self._bad_value(spec, value)
            else:
                values[key] = fitting
        return model.model_construct(**values)

    def _bad_value(self, spec: FieldSpec, got: Any) -> None:
        close = nearest(str(got), [str(choice) for choice in spec.choices]) if isinstance(got, str) else None
        if close:
            choice = next(choice for choice in spec.choices if str(choice) == close)
            fix = Fix(f"set {spec.name} to {shown(choice)}", {spec.path: choice})
            self._refuse(spec.path, expectation(spec), got, f"Did you mean {shown(choice)}?", "bad-value", fix)
            return
        default = "leave it out" if spec.required else f"leave it out for {shown(spec.default)}"
        fix_default = None if spec.required else Fix(f"back to {shown(spec.default)}", unset=(spec.path,))
        self._refuse(spec.path, expectation(spec), got, f"Change it, or {default}.", "bad-value", fix_default)

    # Kinds

    def _model_of(
        self, name: str, models: dict[str, type[Section]], raw: Mapping[str, Any]
    ) -> tuple[type[Section], bool]:
        """The model for the section's kind, and whether the kind is one that this version has."""
        if "" in models:
            return models[""], True
        default: type[Section] = Sft if name == "method" else NoAdapter
        spec = fields[f"{name}.kind"]
        given = raw.get("kind")
        if "kind" not in raw or given is None:
            return default, True
        kind = meaning(spec, given)
        if isinstance(kind, str) and kind in models:
            return models[kind], True
        self._bad_kind(spec, given)
        return default, False

    def _bad_kind(self, spec: FieldSpec, got: Any) -> None:
        word = str(got).strip().lower()
        if spec.section == "adapter" and word == "qlora":
            todo = "QLoRA is LoRA on 4-bit weights: set kind to lora and model.quantization to nf4."
            fix = Fix("use LoRA on 4-bit weights", {spec.path: "lora", "model.quantization": "nf4"})
            self._refuse(spec.path, expectation(spec), got, todo, "bad-value", fix)
        else:
            meant = {"full": "none", "pt": "pretrain", "cpt": "pretrain", "finetune": "sft", "rm": "reward"}.get(word)
            close_kind = meant or nearest(word, spec.choices)
            known = f"Did you mean {close_kind}?" if close_kind else "Choose one of them."
            fix_kind = Fix(f"set kind to {close_kind}", {spec.path: close_kind}) if close_kind else None
            name = "unknown-method" if spec.section == "method" else "bad-value"
            self._refuse(spec.path, expectation(spec), got, known, name, fix_kind)

    def _wrong_kind(self, spec: FieldSpec, got: Any, model: type[Section]) -> None:
        kind = model.model_fields["kind"].default
        others = " or ".join(spec.kinds)
        rule = f"left out while {spec.section}.kind is {kind}, which has no such setting"
        todo = f"Set {spec.section}.kind to {others}, or remove it."
        self._refuse(
            spec.path, rule, got, todo, "setting-of-another-kind", Fix(f"remove {spec.name}", unset=(spec.path,))
        )

    def _whole_section(self, name: str, raw: Any) -> None:
        """The section holds one value, as in `method: dpo`: say which setting was probably meant."""
        rule = f"settings of the form `key: value`, such as `{next(iter(fields_in(name)))}`"
        first = {"model": "name", "method": "kind", "adapter": "kind"}.get(name)
        changes: dict[str, Any] | None = None
        if first and isinstance(raw, str):
            changes = {f"{name}.{first}": raw}
            if name == "adapter" and raw.lower() == "qlora":
                changes = {"adapter.kind": "lora", "model.quantization": "nf4"}
        elif name == "data" and isinstance(raw, (str, list)):
            changes = translate("datasets", raw)
        if changes:
            where = " and ".join(changes)
            self._refuse(
                name,
                rule,
                raw,
                f"Write it as {where}.",
                "section-needs-keys",
                Fix(f"write it as {where}", changes, (name,)),
            )
        else:
            self._refuse(name, rule, raw, "Put the settings below it, indented.", "section-needs-keys")

    # Keys

    def _unknown(self, section: str, key: Any, value: Any) -> None:
        path = f"{section}.{key}" if section else str(key)
        rule = f"a setting of {section}" if section else "a section of the config"
        if not isinstance(key, str):
            self._refuse(path, "a name", key, "Remove it.", "unknown-key", Fix("remove it", unset=(path,)), marks=False)
            return
        changes = translate(key, value) if f"{section}.{key}" not in fields else None
        if changes is not None:
            self._foreign(path, rule, key, changes)
            return
        known = _similar(section, key) if key not in INSTEAD else None
        if known and known in fields and fields[known].section != section and fields[known].name != key:
            # A name of another place that is only alike is meant if it can hold the value.
            known = known if not isinstance(fit(fields[known], value), Unmeant) else None
        if known is None:
            todo = f"No setting has such a name. Remove it; `workbench explain` lists the settings of {section or 'each section'}."
            todo = INSTEAD.get(key, todo)
            self._refuse(
                path, rule, key, todo, "unknown-key", Fix(f"remove {visible(key)}", unset=(path,)), marks=False
            )
        elif known in SECTIONS:
            fix = Fix(f"rename to {known}", {known: value}, (path,))
            self._refuse(path, rule, key, f"Did you mean {known}?", "unknown-key", fix, marks=False)
        else:
            spec = fields[known]
            moved = spec.name == key
            todo = f"It belongs in {spec.section}." if moved else f"Did you mean {known}?"
            fix = Fix(f"move to {known}" if moved else f"rename to {known}", {known: _carried(spec, value)}, (path,))
            self._refuse(path, rule, key, todo, "wrong-section" if moved else "unknown-key", fix, marks=False)

    def _foreign(self, path: str, rule: str, key: str, changes: Mapping[str, Any]) -> None:
        if changes:
            ours = " and ".join(changes)
            todo, label = f"Here it is {ours}.", f"write it as {ours}"
            changes = {there: _carried(fields[there], value) for there, value in changes.items()}
        else:
            todo, label = "It is off, which needs no setting here; remove it.", f"remove {key}"
        self._refuse(path, rule, key, todo, "name-of-another-tool", Fix(label, changes, (path,)), marks=False)

    # Sources

    def _sources(self, spec: FieldSpec, raw: Any) -> Any:
        """The entries of `data.train` or `data.eval`: each checked for itself, a hopeless one left out."""
        value = meaning(spec, raw)
        if isinstance(value, Mapping):
            value = [value]
        if not isinstance(value, list):
            return Unmeant(raw)
        entries = []
        for index, entry in enumerate(value):
            built = self._entry(spec, f"{spec.path}.{index}", {"path": entry} if isinstance(entry, str) else entry)
            if built is not None:
                entries.append(built)
        return entries

    def _entry(self, owner: FieldSpec, path: str, entry: Any) -> DataSource | None:
        if not isinstance(entry, Mapping):
            self._refuse(path, "a source with a `path`", entry, "Write it as `path: rows.jsonl`.", "bad-source")
            return None
        specs = {spec.name: spec for spec in owner.items}
        values: dict[str, Any] = {}
        for key, value in entry.items():
            if key not in specs:
                self._unknown_in_entry(path, key, value, specs)
                continue
            self.given.add(f"{path}.{key}")
            fitting = fit(specs[key], value)
            if isinstance(fitting, Unmeant):
                self._bad_in_entry(specs[key], f"{path}.{key}", value)
            else:
                values[key] = fitting
        source = DataSource.model_construct(**values)
        if not source.path.strip() and f"{path}.path" not in self.invalid:
            todo = "Give a file, a folder, a data set or builtin/dates."
            self._refuse(f"{path}.path", "where the rows are", source.path or None, todo, "source-needs-path")
        return source

    def _bad_in_entry(self, spec: FieldSpec, path: str, got: Any) -> None:
        close = nearest(str(got), [str(choice) for choice in spec.choices])
        fix = Fix(f"set {spec.name} to {close}", {path: close}) if close else None
        todo = f"Did you mean {close}?" if close else "Change it or leave it out."
        if spec.name == "format" and str(got) in FORMATS_LATER:
            todo, fix = (
                f"{got} comes in a later version; leave format out to have it detected.",
                Fix("detect it", unset=(path,)),
            )
        self._refuse(path, expectation(spec), got, todo, "bad-value", fix)

    def _unknown_in_entry(self, path: str, key: Any, value: Any, specs: Mapping[str, FieldSpec]) -> None:
        aliases = {"type": "format", "data_files": "path", "file": "path", "name": "path", "field": "columns"}
        close = aliases.get(str(key)) or nearest(str(key), specs)
        where = f"{path}.{visible(str(key))}"
        if close and f"{path}.{close}" not in self.given:
            fix = Fix(f"rename to {close}", {f"{path}.{close}": value}, (f"{path}.{key}",))
            todo = f"Did you mean {close}?"
        else:
            fix = Fix(f"remove {visible(str(key))}", unset=(f"{path}.{key}",))
            todo = f"A source has {', '.join(specs)}."
        self._refuse(where, "a setting of a source", key, todo, "unknown-key", fix, marks=False)


def fields_in(section: str) -> tuple[str, ...]:
    """The names of a section's settings."""
    names: tuple[str, ...] = getattr(fields, section).names()
    return names


def _carried(spec: FieldSpec, value: Any) -> Any:
    """A value on its way to another setting, as that setting's type wants it."""
    carried = meaning(spec, value)
    return carried if isinstance(carried, (str, int, float, bool, list, dict, type(None))) else value


@lru_cache(maxsize=512)
def _similar(section: str, key: str) -> str | None:
    """The section or setting that an unknown key was probably meant to be."""
    leaves: dict[str, list[str]] = {}
    for spec in fields:
        leaves.setdefault(spec.name, []).append(spec.path)
    low = key.strip().lower().replace("-", "_")
    if not section and low in SECTIONS:
        return low
    if len(leaves.get(low, ())) == 1:
        return leaves[low][0]
    if not section and (close := nearest(low, SECTIONS)):
        return close
    foreign = {name: path for name, path in NAMES.items() if name not in CHANGES}
    own = {name: paths[0] for name, paths in leaves.items() if len(paths) == 1}
    if section:
        here = {name: f"{section}.{name}" for name in fields_in(section)}
        here |= {name: path for name, path in foreign.items() if path.startswith(f"{section}.")}
        if found := nearest(low, here):
            return here[found]
    everywhere = {**foreign, **own}
    found = nearest(low, everywhere)
    return everywhere[found] if found else None
