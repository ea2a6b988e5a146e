"""What a feature has done to a run's models, as the receipt says it, and how to take it back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Applied:
    """One feature's row of the receipt. `undo` takes it back from the instances."""

    feature: str
    requested: Any
    effective: Any
    count: int | None
    detail: str
    undo: Callable[[], None] = lambda: None

    def entry(self) -> dict[str, Any]:
        """The row as the `receipt` event holds it."""
        return {name: getattr(self, name) for name in ("feature", "requested", "effective", "count", "detail")}


def left_out(feature: str, auto: str | None) -> Applied | None:
    """The row of a feature that `auto` did not take, for this reason; None where nobody left it to be chosen."""
    return None if auto is None else Applied(feature, "auto", "off", None, auto)
