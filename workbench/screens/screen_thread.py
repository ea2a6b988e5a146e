"""Work beside a screen that shows runs, in a thread of it; what comes of it is said in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from textual.screen import Screen

from engine.errors import WorkbenchError

LONG = 600.0
SECONDS = 6.0


class Beside:
    """`show` shows words on the screen for so many seconds; `changed` is called when a run has new facts."""

    def __init__(self, screen: Screen[None], show: Callable[[str, float], None], changed: Callable[[], object]) -> None:
        self._screen, self.show, self._changed = screen, show, changed

    def run(self, group: str, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Work in a thread, then on the screen with what came of it; a WorkbenchError is shown."""

        def run() -> None:
            try:
                result = work()
            except WorkbenchError as problem:
                self._screen.call_later(self.finished, problem.full_message)
            else:
                self._screen.call_later(then, result)

        self._screen.run_worker(run, thread=True, exclusive=True, group=group, exit_on_error=True)

    def finished(self, words: str) -> None:
        """What came of it."""
        self.show(words, SECONDS)
        self._changed()
