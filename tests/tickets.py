"""Answers of an inspector that are there at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Answered:
    """A ticket that holds its answer from the beginning."""

    done, error = True, None

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def result(self, timeout: float | None = None) -> Any:
        """The answer."""
        return self._answer

    def add_done_callback(self, function: Callable[[Any], object]) -> None:
        """It is called here and now."""
        function(self)

    def cancel(self) -> None:
        """Too late for that."""
