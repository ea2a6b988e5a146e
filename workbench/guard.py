"""The terminal's way back when the app is killed: a forked child that waits, and gives the terminal back in its place.

A process that is killed cannot leave the alternate screen, switch the mouse off or make typing visible again. One
decision worth knowing: the child is forked before anything is imported or any thread begins, stands in a session of its
own so that what ends the app's group does not end it, and does nothing at all while the app lives. Where the app leaves
by its own door, it says a byte and the child goes without a word. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import termios
from collections.abc import Iterator

RESET = (
    "\x1b[?1049l\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1015l\x1b[?1006l\x1b[?1004l\x1b[?2004l\x1b[<u\x1b[?25h\x1b[0m"
    "\x1b[?1016l\x1b[?2048l\x1b[?7h"  # mouse by pixels, resizes told in words, and long lines that are cut instead of wrapped
)
WORDS = (
    "The app was killed, so it could not clean up after itself; the terminal has been given back.\r\n"
    "Runs go on. `workbench` opens the app again and offers what was not saved.\r\n"
)


@contextlib.contextmanager
def guarded_terminal() -> Iterator[None]:
    """While this is open, a killed process leaves the terminal as it was. Standard error must be the terminal."""
    try:
        before = termios.tcgetattr(2)
    except termios.error:
        yield
        return
    heard, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _wait(heard, writing, before)
    os.close(heard)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.write(writing, b".")
        os.close(writing)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)


def _wait(heard: int, writing: int, before: list[object]) -> None:
    """The child's whole life: it never returns."""
    try:
        os.close(writing)
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTTOU, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        nothing = os.open(os.devnull, os.O_RDWR)
        for place in (0, 1):
            os.dup2(nothing, place)
        if os.read(heard, 1) == b"":
            _give_back(before)
    finally:
        os._exit(0)


def _give_back(before: list[object]) -> None:
    now = termios.tcgetattr(2)
    # A shell that has already made its own settings keeps them: only the app takes Ctrl+C as a plain key.
    if not now[3] & termios.ISIG:
        termios.tcsetattr(2, termios.TCSANOW, before)  # type: ignore[arg-type]
    os.write(2, (RESET + WORDS).encode())
