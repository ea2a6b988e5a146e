"""Pydantic's models of the sections, made from their annotations: for the JSON schema of a config, and to hold `fit` against.

A module of its own, since nothing that starts quickly may import pydantic (`engine.config.section`).
"""

from __future__ import annotations

import operator
import types
import typing
from functools import reduce
from typing import Any

import annotated_types
from pydantic import BaseModel, ConfigDict, Field, create_model

from engine.config import section
from engine.config.section import Section

_STRICT = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())
_BOUNDS = {
    section.Gt: annotated_types.Gt,
    section.Ge: annotated_types.Ge,
    section.Lt: annotated_types.Lt,
    section.Le: annotated_types.Le,
}


_MODELS: dict[type[Section], type[BaseModel]] = {}


def pydantic_model(owner: type[Section]) -> type[BaseModel]:
    """The section as a model of pydantic's, with its name, docstring, annotations, bounds and defaults."""
    if owner not in _MODELS:
        _MODELS[owner] = _build_model(owner)
    return _MODELS[owner]


def _build_model(owner: type[Section]) -> type[BaseModel]:
    definitions: dict[str, Any] = {
        name: (_annotation(setting.annotation), _default(setting.default))
        for name, setting in owner.model_fields.items()
    }
    return create_model(
        owner.__name__, __config__=_STRICT, __doc__=owner.__doc__, __module__=owner.__module__, **definitions
    )


def _annotation(annotation: Any) -> Any:
    """The annotation with pydantic's models in the place of sections, which are told apart by `kind`, and its bounds in that of ours."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        marks = [_BOUNDS[type(mark)](*vars(mark).values()) for mark in arguments[1:] if type(mark) in _BOUNDS]
        return typing.Annotated[_annotation(arguments[0]), *marks] if marks else _annotation(arguments[0])
    if origin in (types.UnionType, typing.Union):
        union = reduce(operator.or_, map(_annotation, arguments))
        kinds = all(isinstance(each, type) and issubclass(each, Section) for each in arguments)
        return typing.Annotated[union, Field(discriminator="kind")] if kinds else union
    if origin is list:
        return types.GenericAlias(list, (_annotation(arguments[0]),))
    if isinstance(annotation, type) and not arguments and issubclass(annotation, Section):
        return pydantic_model(annotation)
    return annotation


def _default(value: Any) -> Any:
    return pydantic_model(type(value)).model_construct() if isinstance(value, Section) else value
