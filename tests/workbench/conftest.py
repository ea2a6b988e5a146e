"""For tests of the app: programs in a pseudo-terminal or in tmux, and a place of its own for everything written."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.prestarted import prestarted

SETTLED = {
    "TERM": "xterm-256color",
    "LC_ALL": "C.UTF-8",
    "WORKBENCH_THEME": "dark",
    "TEXTUAL_ANIMATIONS": "none",
}


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """State, cache, config and working directory in the test's own folder; colours as on a good terminal."""
    for name in ("STATE", "CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    for name in ("NO_COLOR", "COLORFGBG", "WORKBENCH_RUNS", "VISUAL", "EDITOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORKBENCH_THEME", "dark")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (prestarted.HERE, prestarted.ROOT))))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)


class Terminal:
    """A program in a pseudo-terminal: `seen` is all that it wrote."""

    def __init__(self, argv: list[str], columns: int, rows: int, env: dict[str, str]) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
            clean = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
            os.execvpe(argv[0], argv, {**clean, **SETTLED, **env})
        self.seen = b""
        self.status: int | None = None

    def type(self, keys: bytes) -> None:
        os.write(self.fd, keys)

    def read(self, seconds: float) -> bool:
        if not select.select([self.fd], [], [], seconds)[0]:
            return False
        try:
            data = os.read(self.fd, 1 << 16)
        except OSError:
            time.sleep(min(seconds, 0.05))  # nobody holds the other end any more, and the program is about to end
            return False
        self.seen += data
        return bool(data)

    def wait_for(self, *words: bytes, timeout: float = 40.0) -> None:
        end = time.monotonic() + timeout
        while not all(word in self.seen for word in words):
            missing = [word for word in words if word not in self.seen]
            assert time.monotonic() < end, f"{missing} never came; the last was {self.seen[-6000:]!r}"
            self.read(0.3)

    def settle(self, quiet: float = 0.5) -> None:
        end = time.monotonic() + 10
        while self.read(quiet) and time.monotonic() < end:
            pass

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def exit_code(self, timeout: float = 15.0) -> int:
        """Wait for the end: the exit code, or minus the signal."""
        end = time.monotonic() + timeout
        while self.status is None:
            self.read(0.05)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = status
            assert time.monotonic() < end, f"it did not end; the last was {self.seen[-400:]!r}"
        while self.read(0.05):
            pass
        return os.waitstatus_to_exitcode(self.status)

    def close(self) -> None:
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        with contextlib.suppress(OSError):
            os.close(self.fd)


@pytest.fixture
def spawn() -> Iterator[Callable[..., Terminal]]:
    """Start a program in a pseudo-terminal of its own; it is ended with the test."""
    started: list[Terminal] = []

    def start(*argv: str, columns: int = 80, rows: int = 24, **env: str) -> Terminal:
        terminal = Terminal(list(argv), columns, rows, env)
        started.append(terminal)
        return terminal

    yield start
    for terminal in started:
        terminal.close()


@pytest.fixture
def workbench_command() -> list[str]:
    """The command as a person types it, in this interpreter."""
    return [sys.executable, "-m", "workbench"]


class Tmux:
    """A private tmux server with one window."""

    def __init__(self, command: str, columns: int, rows: int) -> None:
        self._socket = f"t{uuid.uuid4().hex[:8]}"
        self.run("new-session", "-d", "-x", str(columns), "-y", str(rows), command)

    def run(self, *arguments: str) -> str:
        command = ["tmux", "-L", self._socket, "-f", "/dev/null", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout

    def screen(self) -> str:
        return self.run("capture-pane", "-p")

    def keys(self, *keys: str) -> None:
        for key in keys:
            self.run("send-keys", key)
            time.sleep(0.15)

    def wait_for(self, *words: str, timeout: float = 40.0) -> str:
        end = time.monotonic() + timeout
        while True:
            screen = self.screen()
            if all(word in screen for word in words):
                return screen
            assert time.monotonic() < end, f"{words} never came:\n{screen}"
            time.sleep(0.2)


@pytest.fixture
def tmux() -> Iterator[Callable[..., Tmux]]:
    """A command in tmux at 80x24; skipped where there is no tmux."""
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    servers: list[Tmux] = []

    def start(command: str, columns: int = 80, rows: int = 24) -> Tmux:
        servers.append(Tmux(command, columns, rows))
        return servers[-1]

    yield start
    for server in servers:
        server.run("kill-server")
