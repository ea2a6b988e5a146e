"""A worker that waits for its run: a process with the libraries imported, while a person reads what the run will be.

The window starts a supervisor that has its worker already, and hands it the run at launch: from then on both are that
run's own, as if they had been started for it, and the window may go. Until then they are the window's: they end with it,
however it ends, and after ten minutes. A worker that does not fit the run (other devices, variables, packages or
versions), or that is gone, is left aside, and the run starts one as ever. `WORKBENCH_WARM=0` has none wait.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from engine import figures
from engine.run import spawn
from engine.run.devices import Choice
from engine.run.store import RunFolder

SWITCH = "WORKBENCH_WARM"
IDLE_SECONDS = 600.0
NEEDED_BYTES = 2 << 30
"""The memory that must be free for a process of some 600 MB to wait."""
TAKEN = b"taken"
"""A worker's word that it has its run."""
_ANSWER_SECONDS = 60.0
_LONGEST = 1 << 16


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a worker is started for. One serves a run that wants the same, and has a use for no package that it lacks."""

    method: str
    devices: tuple[str, ...]
    secrets: tuple[str, ...]
    without: tuple[str, ...]
    versions: dict[str, str]

    def serves(self, run: Wanted) -> bool:
        same = (self.devices, sorted(self.secrets), self.versions) == (run.devices, sorted(run.secrets), run.versions)
        return same and set(self.without) <= set(run.without)


class WarmWorker:
    """The window's end: at most one waiting worker. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._line: socket.socket | None = None
        self._wanted: Wanted | None = None
        self._environment: dict[str, str] = {}
        self._pid = 0
        self._ready = self._closed = False

    def wanted(self) -> bool:
        """Whether a worker may wait here at all."""
        return os.environ.get(SWITCH, "1") not in ("", "0", "false") and os.path.isdir("/proc/self")

    def prepare(self, wanted: Wanted) -> None:
        """Have a worker wait for such a run, unless one does, or there is no room."""
        if not self.wanted():
            return
        with self._lock:
            self._receive()
            if self._line is not None and self._wanted is not None and self._wanted.serves(wanted):
                return
            self._leave()
            if not self._closed and _free_bytes() >= NEEDED_BYTES:
                self._start(wanted)

    def summary(self) -> str:
        """What waits, and how much memory it takes; empty where nothing does."""
        with self._lock:
            self._receive()
            if self._line is None or not self._pid:
                return ""
            does = "waits with the libraries" if self._ready else "is loading the libraries"
            size = figures.size(_resident_bytes(self._pid))
            ends = f"It goes with this window, or after {IDLE_SECONDS / 60:.0f} minutes."
            return f"A worker {does} ({size} of memory), so that the run begins sooner. {ends}"

    @property
    def ready(self) -> bool:
        """Whether it has imported all that it can."""
        with self._lock:
            self._receive()
            return self._line is not None and self._ready

    def take(self, run: RunFolder, wanted: Wanted) -> str | None:
        """Hand the run over; what its supervisor says (`0`, or an exit code and words), None where no worker serves it."""
        with self._lock:
            self._receive()
            line = self._line
            fits = self._wanted is not None and self._wanted.serves(wanted) and self._environment == dict(os.environ)
            if line is None or not fits:
                self._leave()
                return None
            self._line = None
        with line, contextlib.suppress(OSError):
            line.settimeout(_ANSWER_SECONDS)
            line.send(str(run.path).encode())
            while report := line.recv(_LONGEST).decode():
                if not report.startswith("{"):
                    return report
        return None

    def close(self) -> None:
        """The worker goes, and none comes any more."""
        with self._lock:
            self._closed = True
            self._leave()

    def _start(self, wanted: Wanted) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._wanted, self._environment = wanted, dict(os.environ)
        self._pid, self._ready = 0, False
        with theirs:
            started = subprocess.Popen(
                [*spawn.python(), "-m", "engine.run.supervise", "wait", "--", json.dumps(asdict(wanted))],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={**os.environ, **spawn.safe_python(os.environ)},
                start_new_session=True,
            )
        started.wait()  # it leaves at once; its child, which stays, is nobody's

    def _receive(self) -> None:
        """Take in what was said since; a line that ended is one that nobody answers."""
        while self._line is not None and select.select([self._line], [], [], 0)[0]:
            try:
                data = self._line.recv(_LONGEST)
            except OSError:
                data = b""
            if not data:
                self._leave()
                return
            news = json.loads(data)
            self._pid, self._ready = news["pid"], news["ready"]

    def _leave(self) -> None:
        if self._line is not None:
            self._line.close()
        self._line, self._pid, self._ready = None, 0, False


class Waiting:
    """The supervisor's end: its worker, which has no run yet."""

    def __init__(self, wanted: Wanted, token: str) -> None:
        self.wanted, self.token = wanted, token
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - until it is handed over
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        choice = Choice(wanted.devices, 1)
        with theirs:
            self.child = subprocess.Popen(
                [*spawn.python(), "-m", "engine.worker", "--wait", wanted.method, ",".join(wanted.without)],
                stdin=theirs.fileno(),
                stdout=self._said,
                stderr=self._said,
                cwd="/",
                env=spawn.environment(os.environ, choice, token, wanted.secrets),
                start_new_session=True,
            )

    def wait_for_run(self, window: socket.socket) -> str:
        """The path of the run that the window hands over; empty once nobody will: the window or the worker is gone, or idle."""
        until = time.monotonic() + IDLE_SECONDS
        ready = False
        while (left := until - time.monotonic()) > 0:
            window.send(json.dumps({"pid": self.child.pid, "ready": ready}).encode())
            readable = select.select([window, self._line], [], [], left)[0]
            if window in readable:
                return window.recv(_LONGEST).decode()
            if self._line in readable and not (ready := bool(self._line.recv(_LONGEST))):
                break
        return ""

    def hand_over(self, run: RunFolder, log: int) -> None:
        """Give the worker its run and its log. Raises OSError where it is gone."""
        self._said.seek(0)
        os.write(log, self._said.read())
        socket.send_fds(self._line, [str(run.path).encode()], [log])

    def taken(self) -> bool:
        """Whether the worker has said that it has the run: one that was about to die is handed a run like any other."""
        with contextlib.suppress(OSError):
            while said := self._line.recv(_LONGEST, socket.MSG_DONTWAIT):
                if said == TAKEN:
                    return True
        return False

    def end(self) -> None:
        """Nobody wants it."""
        self._line.close()
        self.child.kill()
        self.child.wait()


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def _free_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


def wanted_from(text: str) -> Wanted:
    """What `asdict` made of it, from the command line."""
    values = json.loads(text)
    devices, secrets, without = (tuple(values[name]) for name in ("devices", "secrets", "without"))
    return Wanted(values["method"], devices, secrets, without, values["versions"])
