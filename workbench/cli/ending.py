"""What ends a command from outside: SIGTERM and SIGHUP go the way of Ctrl-C, and the exit code says which it was.

A signal is answered once; the same one again ends the process as the system would, so nothing that hangs is kept.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

ENDS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
_received: list[int] = []


@contextlib.contextmanager
def ends_are_interrupts() -> Iterator[None]:
    """Inside, a closed terminal or SIGTERM raises KeyboardInterrupt as Ctrl-C does; what the parent ignores stays so."""
    before = [(number, signal.getsignal(number)) for number in ENDS]
    before = [(number, handler) for number, handler in before if handler not in (None, signal.SIG_IGN)]
    for number, _ in before:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def ended_by() -> tuple[str, int]:
    """What a command says that a signal ended, and its exit code; that of Ctrl-C where there was none of the others."""
    if not _received:
        return "Interrupted.", 130
    return f"Ended by {signal.Signals(_received[0]).name}.", 128 + _received[0]


def _interrupt(number: int, frame: object) -> None:
    _received.append(number)
    signal.signal(number, signal.SIG_DFL)
    raise KeyboardInterrupt
