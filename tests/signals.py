"""Signals that a shell has its background jobs ignore, and `nohup` too: a program inherits that, and so would what tests start."""

from __future__ import annotations

import signal

IGNORED_IN_BACKGROUND = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)


def hear_in_children() -> None:
    """Let programs that this process starts hear what it was told to ignore; it ignores it itself as before.

    A handler is what an exec undoes, and SIG_IGN is not.
    """
    for number in IGNORED_IN_BACKGROUND:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
