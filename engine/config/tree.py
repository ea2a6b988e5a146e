"""RunConfig and the tree of FieldSpecs generated from its sections: everything a form, a page or a rule may ask.

`fields.method.beta` is the FieldSpec of that setting, over all kinds of method and adapter. Code that names a setting
names it so; a typo is an AttributeError at import.
"""

from __future__ import annotations

import copy
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from inspect import get_annotations
from typing import Any, Literal, TypeVar

from engine.config.adapter import ADAPTERS, Adapter, NoAdapter
from engine.config.data import Data, DataSource
from engine.config.distributed import Distributed
from engine.config.kernels import Kernels
from engine.config.kinds import MethodSection
from engine.config.memory import Memory
from engine.config.method import METHODS, Method, Sft
from engine.config.model import Model
from engine.config.optim import Optim
from engine.config.run import Run
from engine.config.section import (
    Control,
    Ge,
    Gt,
    Le,
    Level,
    Lt,
    Required,
    Section,
    Source,
    Title,
    Unit,
    Unsupported,
    Words,
    helps,
)

VERSION: Literal[1] = 1


class RunConfig(Section):
    """A whole config: every section, every setting, nothing missing."""

    version: Literal[1] = VERSION
    model: Model = Model.model_construct()
    method: Method = Sft.model_construct()
    adapter: Adapter = NoAdapter.model_construct()
    data: Data = Data.model_construct()
    optim: Optim = Optim.model_construct()
    memory: Memory = Memory.model_construct()
    kernels: Kernels = Kernels.model_construct()
    distributed: Distributed = Distributed.model_construct()
    run: Run = Run.model_construct()

    def with_values(self, values: Mapping[FieldSpec, Any]) -> RunConfig:
        """This config with other values of some settings, which are taken as they are: nothing is read or judged."""
        sections: dict[str, dict[str, Any]] = {}
        for spec, value in values.items():
            sections.setdefault(spec.section, {})[spec.name] = value
        return self.model_copy(
            update={name: getattr(self, name).model_copy(update=own) for name, own in sections.items()}
        )


AnyMethod = TypeVar("AnyMethod", bound=MethodSection)


def method_of(config: RunConfig, kind: type[AnyMethod]) -> AnyMethod:
    """The method's section, for code that serves this kind alone."""
    assert isinstance(config.method, kind)
    return config.method


# section -> its models by kind; sections without kinds have one under "".
SECTIONS: dict[str, dict[str, type[Section]]] = {
    "model": {"": Model},
    "method": dict(METHODS),
    "adapter": dict(ADAPTERS),
    "data": {"": Data},
    "optim": {"": Optim},
    "memory": {"": Memory},
    "kernels": {"": Kernels},
    "distributed": {"": Distributed},
    "run": {"": Run},
}


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a number must keep to."""

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class FieldSpec:
    """One setting: all that its section says about it."""

    path: str
    section: str
    name: str
    title: str
    control: str
    """bool int float text choice list mapping path sources prompts"""
    choices: tuple[Any, ...]
    labels: dict[str, str]
    """Words for choices, by the choice as text."""
    default: Any
    auto: bool
    nullable: bool
    bounds: Bounds
    unit: str
    level: str
    source: str
    kinds: tuple[str, ...]
    """The kinds of its section that have it; empty where the section has no kinds."""
    unsupported: tuple[Any, ...] = ()
    """Values that the schema knows and this version refuses."""
    required: bool = False
    items: tuple[FieldSpec, ...] = ()
    """For `sources`: the settings of one entry; their paths are relative to the entry."""
    of_text: bool = False
    """For `mapping`: whether its values must be texts."""
    owner: type[Section] = Section
    """The section's class that declares it."""
    variants: tuple[tuple[str, FieldSpec], ...] = ()
    """Where kinds declare it otherwise (another default, other bounds or choices, other words): `(kind, spec)`."""

    def of(self, config: RunConfig) -> FieldSpec:
        """The setting as the config's own kind of method or adapter declares it."""
        return self.for_kind(getattr(config, self.section).kind) if self.variants else self

    def for_kind(self, kind: str) -> FieldSpec:
        """The setting as this kind declares it."""
        return next((spec for name, spec in self.variants if name == kind), self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FieldSpec) and (self.path, self.section) == (other.path, other.section)

    def __hash__(self) -> int:
        return hash(self.path)

    @property
    def help(self) -> str:
        """What it does, in plain sentences: the docstring under the field."""
        return helps(self.owner).get(self.name, "")

    def value(self, config: RunConfig) -> Any:
        """The setting's value in this config; its default where the method or adapter does not have it."""
        return getattr(getattr(config, self.section), self.name, self.default)

    def applies(self, config: RunConfig) -> bool:
        """Whether the config's method or adapter has this setting at all."""
        return not self.kinds or getattr(config, self.section).kind in self.kinds

    def label(self, value: Any) -> str:
        """The words for one value."""
        text = {True: "yes", False: "no", None: "none"}.get(value) if value in (True, False, None) else str(value)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            text = str(value)
        return self.labels.get(str(value), text or str(value))


# Names that people write with capitals.
_SPELLINGS = {
    "lora": "LoRA", "rslora": "rsLoRA", "dora": "DoRA", "qlora": "QLoRA", "kl": "KL", "gpu": "GPU", "cpu": "CPU", "mlp": "MLP",
    "fp32": "float32", "tf32": "TF32", "bf16": "bfloat16", "ce": "cross-entropy", "dpo": "DPO", "vllm": "vLLM",
}  # fmt: skip


def display_name(name: str) -> str:
    """A key as a person writes it: `lora_dropout` as LoRA dropout."""
    words = " ".join(_SPELLINGS.get(word, word) for word in name.split("_"))
    return words[:1].upper() + words[1:] if words[:1].islower() and name.split("_")[0] not in _SPELLINGS else words


def _flatten(annotation: Any) -> Iterator[Any]:
    """The members of a union, `Annotated` and nested unions taken apart; metadata come as they are."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        base, *metadata = typing.get_args(annotation)
        yield from _flatten(base)
        yield from metadata
    elif origin in (types.UnionType, typing.Union):
        for member in typing.get_args(annotation):
            yield from _flatten(member)
    else:
        yield annotation


def _spec(section: str, owner: type[Section], name: str, kinds: tuple[str, ...], path: str) -> FieldSpec:
    setting = owner.model_fields[name]
    parts = [*_flatten(setting.annotation)]
    by_kind = {type(part): part for part in parts}
    choices: list[Any] = []
    auto = nullable = False
    plain: list[Any] = []
    for part in parts:
        origin = typing.get_origin(part)
        if part is type(None):
            nullable = True
        elif origin is Literal:
            for choice in typing.get_args(part):
                if choice == "auto":
                    auto = True
                else:
                    choices.append(choice)
        elif isinstance(part, type) or origin in (list, dict):
            plain.append(part)
    if bool in plain and choices:
        choices = [False, True, *choices]
    control = _control(plain, choices, by_kind.get(Control))
    words = by_kind.get(Words)
    unsupported = by_kind.get(Unsupported)
    return FieldSpec(
        path=path,
        section=section,
        name=name,
        title=by_kind[Title].text if Title in by_kind else display_name(name),
        control=control,
        choices=tuple(choices),
        labels=dict(words.words) if words else {},
        default=copy.copy(setting.default),
        auto=auto,
        nullable=nullable,
        bounds=Bounds(
            gt=by_kind[Gt].gt if Gt in by_kind else None,
            ge=by_kind[Ge].ge if Ge in by_kind else None,
            lt=by_kind[Lt].lt if Lt in by_kind else None,
            le=by_kind[Le].le if Le in by_kind else None,
        ),
        unit=by_kind[Unit].name if Unit in by_kind else "",
        level=by_kind[Level].name if Level in by_kind else "basic",
        source=by_kind[Source].text if Source in by_kind else "",
        kinds=kinds,
        unsupported=tuple(unsupported.values) if unsupported else (),
        required=Required in by_kind,
        items=_entry_specs() if control == "sources" else (),
        of_text=dict[str, str] in plain,
        owner=owner,
    )


def _control(plain: list[Any], choices: list[Any], control: Control | None) -> str:
    if control:
        return control.name
    if choices:
        return "choice"
    for kind, word in ((bool, "bool"), (int, "int"), (float, "float"), (str, "text")):
        if kind in plain:
            return word
    return {list: "list", dict: "mapping"}[typing.get_origin(plain[0])]


@cache
def _entry_specs() -> tuple[FieldSpec, ...]:
    return tuple(_spec("data", DataSource, name, (), name) for name in DataSource.model_fields)


def _section_specs(section: str) -> dict[str, FieldSpec]:
    """All settings of a section over its kinds; `kind` itself takes its choices from them."""
    specs: dict[str, FieldSpec] = {}
    models = SECTIONS[section]
    for model in models.values():
        for name in model.model_fields:
            if name in specs:
                continue
            kinds = tuple(kind for kind, other in models.items() if kind and name in other.model_fields)
            spec = _spec(section, model, name, kinds, f"{section}.{name}")
            if name == "kind":
                specs[name] = _kind_spec(spec, models)
                continue
            others = [kind for kind in kinds if _declarer(models[kind], name) is not _declarer(model, name)]
            variants = tuple((kind, _spec(section, models[kind], name, kinds, spec.path)) for kind in others)
            specs[name] = replace(spec, variants=variants) if variants else spec
    return specs


def _declarer(model: type[Section], name: str) -> type:
    """The class in whose body the field stands."""
    return next(base for base in model.__mro__ if name in get_annotations(base))


def _kind_spec(spec: FieldSpec, models: dict[str, type[Section]]) -> FieldSpec:
    """`kind` itself: its choices are the section's kinds, each in the words of its own class."""
    words = {kind: model.description for kind, model in models.items() if issubclass(model, MethodSection)}
    return replace(spec, choices=tuple(models), labels=words or spec.labels)


class SectionFields:
    """`fields.data`: the section's settings as attributes, and in order by iteration."""

    def __init__(self, name: str, specs: dict[str, FieldSpec]) -> None:
        self._name = name
        self._specs = specs

    def __getattr__(self, name: str) -> FieldSpec:
        try:
            return self._specs[name]
        except KeyError:
            raise AttributeError(f"{self._name} has no setting {name}") from None

    def __iter__(self) -> Iterator[FieldSpec]:
        return iter(self._specs.values())

    def __contains__(self, name: object) -> bool:
        return name in self._specs

    def names(self) -> tuple[str, ...]:
        """The settings' names, in order."""
        return tuple(self._specs)


class Fields:
    """All settings: `fields.optim.learning_rate`, `fields["optim.learning_rate"]`, `for spec in fields`."""

    model: SectionFields
    method: SectionFields
    adapter: SectionFields
    data: SectionFields
    optim: SectionFields
    memory: SectionFields
    kernels: SectionFields
    distributed: SectionFields
    run: SectionFields

    def __init__(self) -> None:
        self._paths: dict[str, FieldSpec] = {}
        for section in SECTIONS:
            specs = _section_specs(section)
            setattr(self, section, SectionFields(section, specs))
            self._paths.update({spec.path: spec for spec in specs.values()})

    def __iter__(self) -> Iterator[FieldSpec]:
        return iter(self._paths.values())

    def __getitem__(self, path: str) -> FieldSpec:
        return self._paths[path]

    def __contains__(self, path: object) -> bool:
        return path in self._paths

    def of(self, config: RunConfig, path: str) -> FieldSpec | None:
        """The setting at this path as the config's own method and adapter declare it."""
        spec = self.get(path)
        return spec.of(config) if spec is not None else None

    def get(self, path: str) -> FieldSpec | None:
        """The setting at this path, also inside an entry of a source (`data.train.0.format`)."""
        found = self._paths.get(path)
        if found is None and path.count(".") == 3:
            section, name, index, item = path.split(".")
            owner = self._paths.get(f"{section}.{name}")
            if owner and owner.items and index.isdigit():
                return next((spec for spec in owner.items if spec.name == item), None)
        return found


fields = Fields()


def fields_of(config: RunConfig) -> tuple[FieldSpec, ...]:
    """The settings that apply to the config's method and adapter, as these declare them, in the order of the file."""
    return tuple(spec.of(config) for spec in fields if spec.applies(config))
