"""An attribute put on one instance, and taken back: what every feature does that wraps a call. The class stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ABSENT = object()


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

    return undo


def all_of(undos: list[Callable[[], None]]) -> Callable[[], None]:
    """One undo of many, the last first."""

    def undo() -> None:
        for each in reversed(undos):
            each()

    return undo
