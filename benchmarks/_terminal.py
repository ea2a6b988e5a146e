"""A program in a pseudo-terminal of its own: start it, type, wait for words on its screen, with the clock running."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import pty
import select
import signal
import struct
import termios
import time


class Terminal:
    """80x24 by default. `seen` is everything the program wrote since the last `forget`."""

    def __init__(self, argv: list[str], columns: int = 80, rows: int = 24, env: dict[str, str] | None = None) -> None:
        self.started = time.perf_counter()
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
            extra = {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": str(rows), "LC_ALL": "C.UTF-8"}
            # Compiled modules are kept, as in any installation.
            mine = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
            os.execvpe(argv[0], argv, {**mine, **extra, **(env or {})})
        self.seen = b""

    def type(self, keys: bytes) -> float:
        """Send keys; gives the time at which they were sent."""
        now = time.perf_counter()
        os.write(self.fd, keys)
        return now

    def pump(self, seconds: float) -> bool:
        """Read what is there within so many seconds; False when nothing came or the program ended."""
        ready, _, _ = select.select([self.fd], [], [], seconds)
        if not ready:
            return False
        try:
            data = os.read(self.fd, 1 << 16)
        except OSError:
            return False
        self.seen += data
        return bool(data)

    def wait_for(self, *words: bytes, timeout: float = 30.0) -> float:
        """The time at which all words had been written. Raises TimeoutError."""
        end = time.perf_counter() + timeout
        while not all(word in self.seen for word in words):
            if time.perf_counter() > end:
                raise TimeoutError(f"{words} not on screen; last seen {self.seen[-400:]!r}")
            self.pump(0.5)
        return time.perf_counter()

    def settle(self, quiet: float = 0.3, longest: float = 10.0) -> None:
        """Read until nothing comes for a while."""
        end = time.perf_counter() + longest
        while self.pump(quiet) and time.perf_counter() < end:
            pass

    def processor_seconds(self) -> float:
        """What its first thread has had of a processor, which other programs change little (Linux; NaN elsewhere)."""
        try:
            with open(f"/proc/{self.pid}/task/{self.pid}/schedstat") as file:
                return int(file.read().split()[0]) / 1e9
        except OSError:
            return math.nan

    def forget(self) -> None:
        """Start looking anew."""
        self.seen = b""

    def close(self, number: int = signal.SIGKILL) -> int:
        """End the program; its wait status."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
        end = time.perf_counter() + 5
        while time.perf_counter() < end:
            self.pump(0.05)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                os.close(self.fd)
                return status
        os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        os.close(self.fd)
        return status
