"""A setting, a section or a term in plain words: what `explain`, the help panels and `/` search show."""

from __future__ import annotations

import textwrap
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from engine.config.coercion import expectation
from engine.config.findings import shown
from engine.config.glossary import TERMS
from engine.config.kinds import MethodSection, example_row, needs_of
from engine.config.method import LEARNING_RATES, METHODS
from engine.config.optimizers import KINDS, Own
from engine.config.recipes import recipe_mapping
from engine.config.renames import NAMES
from engine.config.schedules import SCHEDULES
from engine.config.steps import GOALS
from engine.config.tree import SECTIONS, FieldSpec, RunConfig, fields
from engine.errors import nearest
from engine.planning.auto import AUTO


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a name stands for: a title, plain words, and facts as label and value."""

    name: str
    title: str
    text: str
    facts: tuple[tuple[str, str], ...] = ()

    def as_text(self) -> str:
        """For a terminal, wrapped at 88 columns."""
        lines = [self.name if self.name == self.title else f"{self.name}: {self.title}", ""]
        lines += textwrap.wrap(self.text, 88)
        if self.facts:
            width = max(len(label) for label, _ in self.facts)
            lines.append("")
            for label, value in self.facts:
                lines += textwrap.wrap(
                    value, 100, initial_indent=f"  {label:<{width}}  ", subsequent_indent=" " * (width + 4)
                ) or [f"  {label}"]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return asdict(self)


def explain(name: str) -> Explanation | tuple[str, ...]:
    """The explanation of a setting, section or term; names that are near where there is none."""
    word = name.strip().lower().strip("`")
    if word in fields:
        return of_setting(fields[word])
    if word in SECTIONS:
        return of_section(word)
    exact = [spec for spec in fields if spec.name == word]
    if len(exact) == 1:
        return of_setting(exact[0])
    term = term_of(word)
    if term:
        return Explanation(term, term, TERMS[term], settings_named(term))
    key = word.replace(" ", "_").replace("-", "_")
    settings = [spec for spec in fields if spec.name.lower() == key]
    if len(settings) == 1:
        return of_setting(settings[0])
    if settings:
        return tuple(spec.path for spec in settings)
    if key in NAMES:
        return of_setting(fields[NAMES[key]])
    known = {spec.name: spec.path for spec in fields} | {spec.path: spec.path for spec in fields}
    known |= {term.lower(): term for term in TERMS} | {section: section for section in SECTIONS}
    close = nearest(word, known)
    return (known[close],) if close else ()


def settings_named(term: str) -> tuple[tuple[str, str], ...]:
    """Where a term is set: settings of that name or title, and those that have it among their choices."""

    def key(text: str) -> str:
        return text.lower().replace(" ", "_").replace("-", "_")

    paths = [spec.path for spec in fields if key(term) in (key(spec.name), key(spec.title))]
    paths += [f"{spec.path}: {choice}" for spec in fields for choice in spec.choices if key(str(choice)) == key(term)]
    return (("set by", ", ".join(dict.fromkeys(paths))),) if paths else ()


def term_of(word: str) -> str | None:
    """The glossary's own spelling of a term, whatever the case; plural too."""
    spellings = {term.lower().replace("-", " "): term for term in TERMS}
    plain = word.lower().replace("-", " ").replace("_", " ")
    return spellings.get(plain) or (spellings.get(plain.removesuffix("s")) if plain.endswith("s") else None)


def of_setting(spec: FieldSpec) -> Explanation:
    """A setting: its help, what it takes, its default, where the default comes from."""
    facts = [("takes", expectation(spec) + (f" ({spec.unit})" if spec.unit else ""))]
    facts += [("", f"{shown(choice)}: {spec.label(choice)}") for choice in spec.choices if str(choice) in spec.labels]
    facts.append(("default", shown(spec.default)))
    facts += [(f"with {kind}", f"default {shown(other.default)}: {other.help}") for kind, other in spec.variants]
    if spec.name == "learning_rate":
        facts += [
            (f"auto, {method}", f"{LEARNING_RATES[method, 'lora']:g} with LoRA, {rate:g} with full weights")
            for (method, kind), rate in LEARNING_RATES.items()
            if kind != "lora"
        ]
    elif spec in AUTO:
        facts.append(("auto", "chosen by method, adapter, machine and size; the review shows auto -> value"))
    if spec.unsupported:
        facts.append(
            ("later", f"{', '.join(shown(value) for value in spec.unsupported)}: known, and refused by this version")
        )
    if spec.kinds and spec.name != "kind":
        facts.append(("only with", f"{spec.section}.kind {' or '.join(spec.kinds)}"))
    for item in spec.items:
        facts.append((item.name, item.help))
    for name, settings in own_settings(spec).items():
        facts += [
            (f"{name} {key}", f"{own.takes}, default {shown(own.default)}: {own.text}") for key, own in settings.items()
        ]
    facts.append(("level", spec.level))
    if spec.source:
        facts.append(("source", spec.source))
    return Explanation(spec.path, spec.title, spec.help, tuple(facts))


@dataclass(frozen=True, slots=True)
class Findable:
    """A setting or a term that can be found by words: its title, its path (nothing for a term), and its help."""

    title: str
    path: str
    help: str
    whose: str = ""
    """Why the config has no row for it now."""
    also: str = ""
    """What it is with another method or adapter."""

    @property
    def name(self) -> str:
        """What it is called, for words that are looked for."""
        return f"{self.path} {self.title}".strip().lower()

    def holds(self, words: Collection[str]) -> bool:
        """Whether name or help has all of these words, which are in small letters."""
        return all(word in self.text for word in words)

    @property
    def text(self) -> str:
        """All that is looked through, in small letters."""
        return f"{self.name} {self.help} {self.also}".lower()


def findable(config: RunConfig) -> list[Findable]:
    """Every setting, those of other methods and adapters last with whose they are, then the terms."""
    items = []
    for spec in sorted(fields, key=lambda spec: not spec.applies(config)):
        whose = "" if spec.applies(config) else f"only with {spec.section} {' or '.join(spec.kinds)}"
        items.append(
            Findable(spec.title, spec.path, spec.help, whose, " ".join(other.help for _, other in spec.variants))
        )
    return [*items, *(Findable(term, "", text, "a term") for term, text in TERMS.items())]


def own_settings(spec: FieldSpec) -> dict[str, dict[str, Own]]:
    """What a setting holds that only one optimizer, or one schedule, has; empty for every other setting."""
    if spec is fields.optim.optim_args:
        return {name: kind.own for name, kind in KINDS.items()}
    return SCHEDULES if spec is fields.optim.lr_scheduler_kwargs else {}


def of_kind(section: str, kind: str) -> tuple[str, tuple[str, ...]]:
    """A kind of method or adapter: its words, and paragraphs that say when to take it, what it needs, such a row."""
    model = SECTIONS[section][kind]
    text = " ".join((model.__doc__ or "").split())
    if not issubclass(model, MethodSection):
        return fields[f"{section}.kind"].label(kind), (text,)
    example = example_row(model)
    return model.description, (text, *(("", "A row of its data:", example) if example else ()))


def of_recipe(name: str) -> tuple[str, ...]:
    """What a ready config is for, the rows it needs and such a row, in paragraphs; the demo brings its own rows."""
    mapping = recipe_mapping(name)
    method = METHODS[(mapping.get("method") or {}).get("kind") or fields.method.kind.default]
    note = next((goal.note for goal in GOALS if goal.recipe == name), "")
    if any(str(entry.get("path")).startswith("builtin/") for entry in (mapping.get("data") or {}).get("train") or ()):
        return (note or "Rows and model are made on this machine: nothing is downloaded.",)
    about = (note, needs_of(method)) if note else (" ".join((method.__doc__ or "").split()),)
    example = example_row(method)
    return (*about, *(("", "A row of its data:", example) if example else ()))


def of_section(name: str) -> Explanation:
    """A section: what it is about, and its settings with the first sentence of their help."""
    models = list(SECTIONS[name].values())
    text = " ".join((models[0].__doc__ or "").split()) if len(models) == 1 else f"Its settings depend on {name}.kind."
    members = tuple((spec.name, first_sentence(spec.help)) for spec in fields if spec.section == name)
    return Explanation(name, name, text, members)


def first_sentence(text: str) -> str:
    """The first sentence of a help text."""
    return text.split(". ")[0].rstrip(".") + "."


def names() -> dict[str, list[str]]:
    """Everything that can be explained: settings by section, and terms."""
    by_section = {section: [spec.name for spec in fields if spec.section == section] for section in SECTIONS}
    return {**by_section, "terms": sorted(TERMS, key=str.lower)}
