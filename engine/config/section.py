"""The base of every section, and the marks an annotation can carry: bounds, unit, level, source, control.

A section owns its settings: annotation with bounds and unit, docstring under the field as its help. Nothing else in
the program repeats a name, a default or a bound. Validation here is by type and bounds alone; what depends on other
settings, the machine, the model or the data is a rule (`engine.rules`). Modules of sections do not postpone their
annotations: to evaluate each from its text took a twenty-fifth of `workbench check`.
"""

from __future__ import annotations

import copy
from functools import cache
from itertools import pairwise
from typing import Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ConfigDict

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


class Section(BaseModel):
    """A group of settings: unknown keys are refused, the docstring under a field is its help, values never change.

    Help is read from the source when somebody asks, and pydantic's own validator is built when the JSON schema is: `read`
    checks values by the same annotations (`engine.config.coercion.fit`, held equal by a test), so that a command need
    build neither. Together they would be most of what importing the schema costs.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=(), defer_build=True
    )

    def as_dict(self, *, exclude_defaults: bool = False) -> dict[str, Any]:
        """The settings by name, as copies; with `exclude_defaults` those that differ. Pydantic's own way would build its serializer."""
        values = {name: copy.deepcopy(getattr(self, name)) for name in type(self).model_fields}
        if not exclude_defaults:
            return values
        return {name: value for name, value in values.items() if value != type(self).model_fields[name].default}


@cache
def helps(model: type[Section]) -> dict[str, str]:
    """The docstring under each field of a section, by the field's name; a base section's fields are its own too."""
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
