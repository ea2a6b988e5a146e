"""A process that nobody waits for: it says once that it began, or why it did not, and outlives whoever started it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from engine.errors import RunBusy, WorkbenchError
from engine.run import inside
from engine.run.store import RunFolder

Work = Callable[[Callable[[], None]], None]
"""What such a process does; it calls what it is given once it has begun."""


def detach(work: Work) -> NoReturn:
    """Run `work` in a process that nobody waits for; this one leaves when `work` calls what it is given, or fails."""
    reading, writing = os.pipe()
    if os.fork():
        os.close(writing)
        data = b""
        while block := os.read(reading, 4096):
            data += block
        code, _, text = data.partition(b" ")
        sys.stderr.write(text.decode())
        sys.stderr.flush()
        os._exit(int(code) if code.isdigit() else 1)
    os.close(reading)

    def send(data: bytes) -> None:
        os.write(writing, data)
        os.close(writing)

    answering(work, send)


def answering(work: Work, send: Callable[[bytes], None]) -> NoReturn:
    """Run `work`, and send that it began once it calls what it is given, or an exit code and why it failed before."""
    told = False

    def report(code: int, text: str = "") -> None:
        nonlocal told
        told = True
        send(f"{code} {text}".encode())

    try:
        work(lambda: report(0))
    except (WorkbenchError, OSError) as problem:
        if told:
            raise  # nobody waits for it any more: the traceback goes to worker.log
        report(3 if isinstance(problem, RunBusy) else 1, str(problem))
    os._exit(0)


def hold_on() -> None:
    """What this process makes is its owner's alone, and it does not end with the terminal it was started from."""
    os.umask(0o077)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def quiet(run: RunFolder) -> None:
    """No pipe and no terminal stays open: they would end this process with their owner."""
    log = inside.open_file(run, run.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(null)
    os.close(log)
