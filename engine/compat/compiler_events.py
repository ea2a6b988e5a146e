"""When torch's compiler begins to compile something in this process, and when it is done: torch's own callbacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.compat.instances import noted


def watch_compiler(begun: Callable[[], None], done: Callable[[], None]) -> Callable[[], None]:
    """Has `begun` called where the compiler starts and `done` where it ends, however deep it nests; returns the undo."""
    from torch._dynamo.callback import callback_handler

    def at_start(*_: Any) -> None:
        begun()

    def at_end(*_: Any) -> None:
        done()

    callback_handler.register_start_callback(at_start)
    callback_handler.register_end_callback(at_end)

    def undo() -> None:
        # A reset of the compiler has forgotten them already.
        if at_start in callback_handler.start_callbacks:
            callback_handler.remove_start_callback(at_start)
        if at_end in callback_handler.end_callbacks:
            callback_handler.remove_end_callback(at_end)

    return noted(undo)
