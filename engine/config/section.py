"""The base of every section, and the marks an annotation can carry: bounds, unit, level, source, control.

A section owns its settings: annotation with bounds and unit, docstring under the field as its help. Nothing else in
the program repeats a name, a default or a bound. Values are held to type and bounds by `engine.config.coercion.fit`; what
depends on other settings, the machine, the model or the data is a rule (`engine.rules`). Modules of sections do not postpone
their annotations: to evaluate each from its text took a twenty-fifth of `workbench check`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from inspect import get_annotations
from itertools import pairwise
from typing import Any, ClassVar, Literal, Self, dataclass_transform, get_origin

__all__ = [
    "Advanced",
    "Auto",
    "Control",
    "Expert",
    "Ge",
    "Gt",
    "Le",
    "Level",
    "Lt",
    "Required",
    "Section",
    "Source",
    "Title",
    "Unit",
    "Unsupported",
    "Words",
]

Auto = Literal["auto"]


class Setting:
    """A setting as its section's class declares it: the annotation with its marks, and the default."""

    def __init__(self, annotation: Any, default: Any) -> None:
        self.annotation, self.default = annotation, default


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Section:
    """A group of settings: the docstring under a field is its help, values never change and are taken as they are.

    Methods have the names of pydantic's, which makes a model of each section where a JSON schema is asked for
    (`engine.config.schema`); `read` checks values by the same annotations (`engine.config.coercion.fit`, held equal by a test).
    To import pydantic and make its classes took a quarter of `workbench check` and 50 ms of the app's start.
    """

    model_fields: ClassVar[Mapping[str, Setting]] = {}
    """All settings by name, those of its bases first."""
    _defaults: ClassVar[Mapping[str, Any]] = {}
    _copied: ClassVar[tuple[str, ...]] = ()
    """Settings whose default could be changed in place, of which each section has its own."""

    def __init_subclass__(cls) -> None:
        own = get_annotations(cls)
        if any(isinstance(annotation, str) for annotation in own.values()):
            own = get_annotations(cls, eval_str=True)
        found = dict(cls.model_fields)
        for name, annotation in own.items():
            origin: Any = get_origin(annotation)
            if origin is not ClassVar:
                found[name] = Setting(annotation, getattr(cls, name, None))
        cls.model_fields = found
        cls._defaults = {name: setting.default for name, setting in found.items()}
        cls._copied = tuple(
            name
            for name, setting in found.items()
            if isinstance(setting.default, (list, dict))
            or (isinstance(setting.default, Section) and setting.default._copied)
        )

    def __init__(self, **values: Any) -> None:
        if not values.keys() <= self.model_fields.keys():
            unknown = ", ".join(sorted(values.keys() - self.model_fields.keys()))
            raise TypeError(f"{type(self).__name__} has no setting {unknown}")
        held = self.__dict__
        held.update(self._defaults)
        for name in self._copied:
            held[name] = _own(held[name])
        held.update(values)

    @classmethod
    def model_construct(cls, **values: Any) -> Self:
        """The section with these values, all others at their defaults."""
        return cls(**values)

    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self:
        """This section with other values of some settings."""
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__, **(update or {}))
        return other

    def model_dump(self, *, exclude_defaults: bool = False) -> dict[str, Any]:
        """The settings by name as plain values, which are copies; with `exclude_defaults` those that differ."""
        return {
            name: plain(value, exclude_defaults=exclude_defaults)
            for name, value in self.__dict__.items()
            if not exclude_defaults or value != self.model_fields[name].default
        }

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} never changes: copy the section with another value")

    def __delattr__(self, name: str) -> None:
        self.__setattr__(name, None)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__dict__.items())})"


def _own(value: Any) -> Any:
    """A list, mapping or section of which nothing that could be changed in place is another's."""
    if not isinstance(value, Section):
        return copy.copy(value)
    return value.model_copy(update={name: _own(value.__dict__[name]) for name in value._copied})


def plain(value: Any, *, exclude_defaults: bool = True) -> Any:
    """A value of a config as plain data: sections as mappings, of what differs from the defaults unless all is asked for."""
    if isinstance(value, Section):
        return value.model_dump(exclude_defaults=exclude_defaults)
    if isinstance(value, list):
        return [plain(item, exclude_defaults=exclude_defaults) for item in value]
    if isinstance(value, dict):
        return {key: plain(item, exclude_defaults=exclude_defaults) for key, item in value.items()}
    return value


_HELPS: dict[type[Section], dict[str, str]] = {}


def helps(model: type[Section]) -> dict[str, str]:
    """The docstring under each field of a section, by the field's name; a base section's fields are its own too."""
    if model not in _HELPS:
        _HELPS[model] = _read_helps(model)
    return _HELPS[model]


def _read_helps(model: type[Section]) -> dict[str, str]:
    import ast
    import sys
    from pathlib import Path

    base = model.__base__
    texts: dict[str, str] = dict(helps(base)) if base is not None and base is not Section else {}
    tree = ast.parse(Path(sys.modules[model.__module__].__file__ or "").read_text(encoding="utf-8"))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == model.__name__)
    for field, below in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            text = below.value.value if isinstance(below.value, ast.Constant) else None
            if isinstance(text, str) and field.target.id in model.model_fields:
                texts[field.target.id] = " ".join(text.split())
    return texts


# The marks are plain classes, told apart by type and identity: six dataclasses take 4 ms to make, in every command.
class Gt:
    """A bound: the number is above it."""

    def __init__(self, gt: float) -> None:
        self.gt = gt


class Ge:
    """A bound: the number is at least this."""

    def __init__(self, ge: float) -> None:
        self.ge = ge


class Lt:
    """A bound: the number is below it."""

    def __init__(self, lt: float) -> None:
        self.lt = lt


class Le:
    """A bound: the number is at most this."""

    def __init__(self, le: float) -> None:
        self.le = le


class Unit:
    """What a number counts, shown after it."""

    def __init__(self, name: str) -> None:
        self.name = name


class Level:
    """Who needs the setting: basic, advanced or expert."""

    def __init__(self, name: Literal["basic", "advanced", "expert"]) -> None:
        self.name = name


Advanced = Level("advanced")
Expert = Level("expert")


class Source:
    """Where the setting or its default comes from: a paper, or the library that owns the name."""

    def __init__(self, text: str) -> None:
        self.text = text


class Title:
    """The setting's name in words; without it the key is used, `_` read as a space."""

    def __init__(self, text: str) -> None:
        self.text = text


class Control:
    """How a form shows it, where the type alone does not tell."""

    def __init__(self, name: str) -> None:
        self.name = name


class Required:
    """The config cannot run while this is empty."""


class Words:
    """What the choices mean, in words: `Words(adapter_off="adapter switched off")`."""

    def __init__(self, **words: str) -> None:
        self.words = words


class Unsupported:
    """Values that the schema knows and this version refuses (by a rule of their own); forms leave them out."""

    def __init__(self, *values: Any) -> None:
        self.values = values
