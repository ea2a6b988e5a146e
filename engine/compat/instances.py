"""An attribute put on one instance, and taken back: what every feature does that wraps a call. The class stays as it is.

A feature is there whole or not at all: one that fails inside of `whole` half way leaves nothing of what it had put.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

_ABSENT = object()
_MADE: ContextVar[list[Callable[[], None]] | None] = ContextVar("made", default=None)


def put(instance: Any, name: str, value: Any) -> Callable[[], None]:
    """Sets the attribute on this instance; the undo brings back what the instance had, or else what its class has.

    Undone in the reverse order of their making, wraps of one call leave no trace.
    """
    before = vars(instance).get(name, _ABSENT)
    setattr(instance, name, value)

    def undo() -> None:
        vars(instance).pop(name, None)
        if before is not _ABSENT:
            setattr(instance, name, before)

    return noted(undo)


def noted(undo: Callable[[], None]) -> Callable[[], None]:
    """The same undo, which `whole` calls if what follows fails."""
    if (made := _MADE.get()) is not None:
        made.append(undo)
    return undo


@contextlib.contextmanager
def atomic() -> Iterator[None]:
    """An error inside takes back, in the reverse order, what was put inside."""
    made: list[Callable[[], None]] = []
    outer, token = _MADE.get(), _MADE.set(made)
    try:
        yield
    except BaseException:
        all_of(made)()
        raise
    finally:
        _MADE.reset(token)
    if outer is not None:
        outer.extend(made)


@contextlib.contextmanager
def in_mode(model: torch.nn.Module, *, training: bool) -> Iterator[None]:
    """Training or evaluation mode within; afterwards the mode of each module is what it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, was in modes:
            module.training = was


def all_of(undos: list[Callable[[], None]]) -> Callable[[], None]:
    """One undo of many, the last first."""

    def undo() -> None:
        for each in reversed(undos):
            each()

    return undo
