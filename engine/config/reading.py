"""`read`: a mapping in, a whole config and every finding out. It never raises for what a person wrote.

A bad value is replaced by its default and its path is marked invalid; rules that read an invalid setting are skipped.
Unknown keys are answered with the nearest setting, the right section, or our name for another tool's key. A fix is offered
where the meaning is known alone: the key is one of ours or of another tool's, the value fits where it goes, and nothing
stands there yet. Likeness gives a name in the sentence. While keys are unknown, rules offer no fixes: what they miss may
be what such a key says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from engine.config.absent import METHODS as METHODS_ABSENT
from engine.config.absent import absent, absent_value, other_file
from engine.config.adapter import NoAdapter
from engine.config.adapter_folder import taken_over
from engine.config.coercion import Uncoerced, coerce, expectation, fit
from engine.config.data import DataSource
from engine.config.facts import Facts
from engine.config.findings import RANK, Finding, Fix, must, shown
from engine.config.kinds import SYNTHETIC
from engine.config.method import Sft
from engine.config.migrate import migrate
from engine.config.renames import CHANGES, ENTRY_TYPES, NAMES, SAME_HERE, is_needless, is_off, sentence_for, translate
from engine.config.section import Section
from engine.config.tree import SECTIONS, VERSION, FieldSpec, RunConfig, fields
from engine.errors import WorkbenchError, nearest, visible

Rules = Callable[[RunConfig, Facts, Collection[str]], Iterable[Finding]]
"""The findings for a config and facts; what reads one of the invalid paths is left out."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What was read: always a whole config; `invalid` and `given` are dotted paths."""

    config: RunConfig
    findings: tuple[Finding, ...]
    invalid: frozenset[str]
    given: frozenset[str]

    @property
    def errors(self) -> tuple[Finding, ...]:
        """What keeps a run from being started."""
        return tuple(finding for finding in self.findings if finding.severity == "error")

    @property
    def ok(self) -> bool:
        """Whether nothing of severity error was found."""
        return not self.errors

    def accepted(self, refusal: str = "") -> RunConfig:
        """The config. Raises WorkbenchError with the first error in it, behind `refusal`."""
        for finding in self.errors:
            raise WorkbenchError(f"{refusal} {finding.message}".lstrip())
        return self.config


def read(mapping: Mapping[str, Any] | None, facts: Facts | None, rules: Rules) -> Reading:
    """The config that `mapping` describes, and all that is wrong with it at once, by the rules too."""
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
    config = taken_over(config, facts)
    ruled: Iterable[Finding] = () if reader.is_other_file else rules(config, facts, reader.invalid)
    if reader.unread:
        ruled = (dataclasses.replace(finding, fix=None) for finding in ruled)
    findings = [*reader.findings, *ruled]
    findings.sort(key=lambda finding: RANK[finding.severity])
    return Reading(config, tuple(findings), frozenset(reader.invalid), given)


_SAID_OTHERWISE = ("name-of-another-tool", "wrong-section", "unknown-key", "section-needs-keys", "not-here-yet")
_KNOWN_VALUES = ("bad-value", "unknown-method")


def keeps_meaning(finding: Finding) -> bool:
    """Whether its fix makes the file say what it says already: a key under its name here, a value that is known."""
    if finding.fix is None or finding.severity != "error":
        return False
    return finding.rule in _SAID_OTHERWISE or (finding.rule in _KNOWN_VALUES and bool(finding.fix.set))


class _Reader:
    """One reading: gathers findings, invalid paths and given paths while it goes through the sections."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.invalid: set[str] = set()
        self.given: set[str] = set()
        self.unread = False
        """Whether there are keys whose meaning is not in the config."""
        self.is_other_file = False
        self._mapping: Mapping[str, Any] = {}
        self._claims: dict[str, list[tuple[str, Any]]] = {}
        """What keys outside their place say for each setting, as (key, value)."""

    def config(self, mapping: Mapping[str, Any]) -> RunConfig:
        version = mapping.get("version", VERSION)
        if other := other_file(mapping):
            what, shown_by = other
            todo = "Write a training config with `workbench new -o my.yaml`."
            self.findings.append(
                must(
                    "",
                    "the config of a training",
                    shown_by,
                    f"Such a file describes {what}. {todo}",
                    name="no-training",
                )
            )
            self.is_other_file = True
            mapping = {}
        mapping, problem = migrate(mapping)
        if problem:
            self._refuse("version", str(VERSION), version, problem, "version")
        self._mapping, self._claims = mapping, _claims(mapping)
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
            self._section_value(name, raw)
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
            if isinstance(fitting, Uncoerced):
                self._bad_value(spec, value)
            else:
                values[key] = fitting
        return model.model_construct(**values)

    def _bad_value(self, spec: FieldSpec, got: Any) -> None:
        choices = [str(choice) for choice in spec.choices if choice not in spec.unsupported]
        close = nearest(str(got), choices) if isinstance(got, str) else None
        default = "leave it out" if spec.required else f"leave it out for {shown(spec.default)}"
        todo = f"Did you mean {close}?" if close else f"Change it, or {default}."
        self._refuse(spec.path, expectation(spec), got, absent_value(spec.path, got) or todo, "bad-value")

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
        kind = coerce(spec, given)
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
            other_words = {"adapter": {"full": "none"}, "method": {"pt": "pretrain", "cpt": "pretrain", "rm": "reward"}}
            meant = other_words[spec.section].get(word)
            fix_kind = Fix(f"set kind to {meant}", {spec.path: meant}) if meant else None
            close_kind = meant or nearest(word, spec.choices)
            known = f"Did you mean {close_kind}?" if close_kind else "Choose one of them."
            if spec.section == "method" and word.replace("-", "_") in METHODS_ABSENT:
                known = f"{visible(word)} is not here yet. Choose one of them."
            name = "unknown-method" if spec.section == "method" else "bad-value"
            self._refuse(spec.path, expectation(spec), got, known, name, fix_kind)

    def _wrong_kind(self, spec: FieldSpec, got: Any, model: type[Section]) -> None:
        kind = model.model_fields["kind"].default
        others = " or ".join(spec.kinds)
        rule = f"left out while {spec.section}.kind is {kind}, which has no such setting"
        todo = f"Set {spec.section}.kind to {others}, or remove it."
        # A kind that nobody wrote may be the mistake.
        written = f"{spec.section}.kind" in self.given and not self._claims.get(f"{spec.section}.kind")
        fix = Fix(f"remove {spec.name}", unset=(spec.path,)) if written else None
        self._refuse(spec.path, rule, got, todo, "setting-of-another-kind", fix)

    def _section_value(self, name: str, raw: Any) -> None:
        """The section holds one value, as in `method: dpo`: say which setting was probably meant."""
        rule = f"settings of the form `key: value`, such as `{next(iter(fields_in(name)))}`"
        changes = _of_one_value(name, raw)
        if not changes:
            self._refuse(name, rule, raw, "Put the settings below it, indented.", "section-needs-keys")
            return
        where = " and ".join(changes)
        reason = self._hindrance(name, changes)
        fix = None if reason else Fix(f"write it as {where}", changes, (name,))
        self._refuse(name, rule, raw, f"Write it as {where}.{reason}", "section-needs-keys", fix)

    # Keys

    def _unknown(self, section: str, key: Any, value: Any) -> None:
        """A key that is no setting here: what it is known for, or what it looks like."""
        path = f"{section}.{key}" if section else str(key)
        rule = f"a setting of {section}" if section else "a section of the config"
        self.unread = True

        def answer(todo: str, name: str = "unknown-key", fix: Fix | None = None) -> None:
            self._refuse(path, rule, key, todo, name, fix, marks=False)

        if not isinstance(key, str):
            answer("Remove it.")
            return
        remove = Fix(f"remove {visible(key)}", unset=(path,))
        changes = translate(key, value, self._mapping)
        exact = _exact(section, key)
        missing = absent(key) if exact is None or (fields[exact].unsupported and not is_off(value)) else None
        if changes is not None and not changes:
            answer("It is off, which needs no setting here; remove it.", "name-of-another-tool", remove)
        elif changes:
            self._foreign(path, key, changes, answer)
        elif missing is not None:
            answer(missing.sentence, "not-here-yet", remove if is_off(value) else None)
        elif sentence := sentence_for(key):
            answer(sentence, "name-of-another-tool", remove if is_needless(key, value) else None)
        elif key in NAMES:
            answer(f"Here it is {NAMES[key]}.", "name-of-another-tool")
        elif exact is not None:
            changes = {exact: _carried(fields[exact], value)}
            reason = self._hindrance(path, changes)
            fix = None if reason else Fix(f"move to {exact}", changes, (path,))
            answer(f"It belongs in {fields[exact].section}.{reason}", "wrong-section", fix)
        elif slip := _slip(section, key):
            changes = {slip: _carried(fields[slip], value)}
            reason = self._hindrance(path, changes)
            fix = None if reason else Fix(f"rename to {slip}", changes, (path,))
            answer(f"Did you mean {slip}?{reason}", fix=fix)
        else:
            close = _similar(section, key)
            if close is not None:
                answer(f"Did you mean {close}?")
            else:
                lists = f"`workbench explain` lists the settings of {section or 'each section'}."
                answer(f"No setting has such a name; {lists}", fix=remove if value is None else None)

    def _foreign(self, path: str, key: str, changes: Mapping[str, Any], answer: Callable[..., None]) -> None:
        ours = " and ".join(changes)
        carried = {there: _carried(fields[there], value) for there, value in changes.items()}
        reason = self._hindrance(path, carried)
        standing = all(_written(self._mapping, there) == value for there, value in carried.items())
        fix = Fix(f"remove {key}" if standing else f"write it as {ours}", {} if standing else carried, (path,))
        answer(f"Here it is {ours}.{reason}", "name-of-another-tool", None if reason else fix)

    def _hindrance(self, path: str, changes: Mapping[str, Any]) -> str:
        """Why what is known to be meant cannot simply be written, as a sentence; empty where it can."""
        for there, carried in changes.items():
            spec, section = fields[there], there.partition(".")[0]
            kind = changes.get(f"{section}.kind") or (_written(self._mapping, f"{section}.kind"))
            standing = self._mapping.get(section)
            others = [other for other, claimed in self._claims.get(there, ()) if other != path and claimed != carried]
            if section in self._mapping and section != path and not isinstance(standing, (Mapping, type(None))):
                return f" Write the section {section} as settings first."
            if _written(self._mapping, there) not in (None, carried):
                return f" This file says {there} too: keep one of the two."
            if others:
                return f" {visible(others[0])} says it otherwise: keep one of the two."
            if spec.kinds and spec.name != "kind" and (kind or _DEFAULT_KIND[section]) not in spec.kinds:
                return f" It goes with {section}.kind {' or '.join(spec.kinds)}."
            declared = spec.for_kind(kind) if isinstance(kind, str) else spec
            same, todo = SAME_HERE.get(there, (None, ""))
            if same is not None and not same(carried):
                return f" {todo}"
            if spec.control != "sources" and (
                carried in spec.unsupported or isinstance(fit(declared, carried), Uncoerced)
            ):
                return f" There it must be {expectation(declared)}."
        return ""

    # Sources

    def _sources(self, spec: FieldSpec, raw: Any) -> Any:
        """The entries of `data.train` or `data.eval`: each checked for itself, a hopeless one left out."""
        value = coerce(spec, raw)
        if isinstance(value, Mapping):
            value = [value]
        if not isinstance(value, list):
            return Uncoerced(raw)
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
                self._unknown_in_entry(path, key, value, specs, entry)
                continue
            self.given.add(f"{path}.{key}")
            fitting = fit(specs[key], value)
            if isinstance(fitting, Uncoerced):
                self._bad_in_entry(specs[key], f"{path}.{key}", value)
            else:
                values[key] = fitting
        if values.get("format") == "synthetic" and "path" not in values and f"{path}.path" not in self.invalid:
            values["path"] = SYNTHETIC
        source = DataSource.model_construct(**values)
        if not source.path.strip() and f"{path}.path" not in self.invalid:
            todo = "Give a file, a folder, a data set or builtin/dates."
            self._refuse(f"{path}.path", "where the rows are", source.path or None, todo, "source-needs-path")
        return source

    def _bad_in_entry(self, spec: FieldSpec, path: str, got: Any) -> None:
        close = nearest(str(got), [str(choice) for choice in spec.choices])
        todo = f"Did you mean {close}?" if close else "Change it or leave it out."
        self._refuse(path, expectation(spec), got, todo, "bad-value")

    def _unknown_in_entry(
        self, path: str, key: Any, value: Any, specs: Mapping[str, FieldSpec], entry: Mapping[str, Any]
    ) -> None:
        """A key that no source has."""
        where, fix = f"{path}.{visible(str(key))}", None
        self.unread = True
        meant: tuple[str, Any] | None = None
        if key == "type" and isinstance(value, str) and value in ENTRY_TYPES:
            meant = ("format", ENTRY_TYPES[value])
        elif key == "file" and isinstance(value, str):
            meant = ("path", value)
        if meant is not None and meant[0] not in entry:
            todo = f"Here it is {meant[0]}."
            fix = Fix(f"write it as {meant[0]}", {f"{path}.{meant[0]}": meant[1]}, (f"{path}.{key}",))
        elif value is None:
            todo, fix = "It says nothing; remove it.", Fix(f"remove {visible(str(key))}", unset=(f"{path}.{key}",))
        elif str(key) not in _OF_ENTRIES and (close := nearest(str(key), specs, cutoff=0.7)) and close not in entry:
            todo = f"Did you mean {close}?"
            slip = _is_slip(str(key), close) and not isinstance(fit(specs[close], value), Uncoerced)
            fix = Fix(f"rename to {close}", {f"{path}.{close}": value}, (f"{path}.{key}",)) if slip else None
        else:
            todo = _OF_ENTRIES.get(str(key), f"A source has {', '.join(specs)}.")
        self._refuse(where, "a setting of a source", key, todo, "unknown-key", fix, marks=False)


_OF_ENTRIES = {
    "name": "A data set's parts have no setting here: bring the rows of this one as a file.",
    "type": "Its format is detected; format and columns say it otherwise.",
    "data_files": "Each file is a source with a path of its own.",
    "message_property_mappings": "properties names the keys inside a message, as `role: speaker`.",
    "text_column": "columns names the columns of a source, as `text: body`.",
    "field_messages": "columns names the columns of a source, as `messages: conversation`.",
    "field_chosen": "columns names the columns of a source, as `chosen: answer`.",
    "field_rejected": "columns names the columns of a source, as `rejected: answer`.",
    "shards": "rows takes the first so many.",
}
_DEFAULT_KIND = {"method": "sft", "adapter": "none"}


def fields_in(section: str) -> tuple[str, ...]:
    """The names of a section's settings."""
    names: tuple[str, ...] = getattr(fields, section).names()
    return names


def _carried(spec: FieldSpec, value: Any) -> Any:
    """A value on its way to another setting, as that setting's type wants it."""
    carried = coerce(spec, value)
    return carried if isinstance(carried, (str, int, float, bool, list, dict, type(None))) else value


def _written(mapping: Mapping[str, Any], path: str) -> Any:
    """What the file says at a setting, as its type wants it; nothing where it says nothing."""
    section, _, name = path.partition(".")
    settings = mapping.get(section)
    value = settings.get(name) if isinstance(settings, Mapping) else None
    return None if value is None or path not in fields else _carried(fields[path], value)


def _of_one_value(section: str, raw: Any) -> dict[str, Any]:
    """The settings that a section written as one value stands for, as `method: dpo`; none where that is not known."""
    if section == "adapter" and isinstance(raw, str) and raw.strip().lower() == "qlora":
        return {"adapter.kind": "lora", "model.quantization": "nf4"}
    if section == "data" and isinstance(raw, (str, list)):
        return translate("datasets", raw) or {}
    first = {"model": "name", "method": "kind", "adapter": "kind", "optim": "optim"}.get(section)
    if first is None or not isinstance(raw, str):
        return {}
    spec = fields[f"{section}.{first}"]
    return {} if isinstance(fit(spec, raw), Uncoerced) else {spec.path: coerce(spec, raw)}


def _claims(mapping: Mapping[str, Any]) -> dict[str, list[tuple[str, Any]]]:
    """What keys outside their place say for each setting, so that two that disagree are seen."""
    claims: dict[str, list[tuple[str, Any]]] = {}
    for key, value in mapping.items():
        if not isinstance(key, str):
            continue
        if key in SECTIONS:
            changes = {} if isinstance(value, Mapping) else _of_one_value(key, value)
        else:
            exact = _exact("", key)
            changes = translate(key, value, mapping) or ({exact: value} if exact else {})
        for there, change in changes.items():
            claims.setdefault(there, []).append((key, _carried(fields[there], change)))
    return claims


@lru_cache(maxsize=512)
def _exact(section: str, key: str) -> str | None:
    """The one setting of this very name, where it stands in another section."""
    low = key.strip().lower().replace("-", "_")
    if section and f"{section}.{low}" in fields:
        return f"{section}.{low}"
    paths = [spec.path for spec in fields if spec.name == low]
    return paths[0] if len(paths) == 1 else None


def _slip(section: str, key: str) -> str | None:
    """The setting of this section that the key is a slip of the finger away from."""
    low = key.strip().lower().replace("-", "_")
    names = [name for name in fields_in(section) if _is_slip(low, name)] if section else []
    return f"{section}.{names[0]}" if len(names) == 1 else None


def _is_slip(word: str, name: str) -> bool:
    """Whether two neighbouring letters changed places, or one letter is missing or too many; digits say something."""
    if min(len(word), len(name)) < 4 or [*filter(str.isdigit, word)] != [*filter(str.isdigit, name)]:
        return False
    short, long = sorted((word, name), key=len)
    if len(short) == len(long):
        differ = [place for place in range(len(word)) if word[place] != name[place]]
        return len(differ) == 2 and differ[1] == differ[0] + 1 and sorted(word) == sorted(name)
    return len(long) == len(short) + 1 and any(long[:at] + long[at + 1 :] == short for at in range(len(long)))


@lru_cache(maxsize=512)
def _similar(section: str, key: str) -> str | None:
    """The section or setting whose name an unknown key is most like: a word for the sentence, never a fix."""
    low = key.strip().lower().replace("-", "_")
    if not section and (close := nearest(low, SECTIONS)) and _is_slip(low, close):
        return close
    leaves: dict[str, list[str]] = {}
    for spec in fields:
        leaves.setdefault(spec.name, []).append(spec.path)
    foreign = {name: path for name, path in NAMES.items() if name not in CHANGES}
    if section:
        here = {name: f"{section}.{name}" for name in fields_in(section)}
        here |= {name: path for name, path in foreign.items() if path.startswith(f"{section}.")}
        if found := nearest(low, here):
            return here[found]
    everywhere = {**foreign, **{name: paths[0] for name, paths in leaves.items() if len(paths) == 1}}
    found = nearest(low, everywhere, cutoff=0.8)
    return everywhere[found] if found else None
