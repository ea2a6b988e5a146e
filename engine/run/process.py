"""Who a process is: pid alone is never believed, because numbers are used again.

An identity is (pid, start time, boot id, host). A process of another host or an earlier boot cannot be looked at from
here, and this module says so instead of guessing. Linux reads /proc; elsewhere psutil stands in.
"""

from __future__ import annotations

import os
import platform
import signal
from dataclasses import dataclass
from functools import cache
from typing import Any

_OUTERMOST = "pid:[4026531836]"
"""The kernel's own name of the PID namespace that is no container's."""


@cache
def boot_id() -> str:
    """This boot of this machine, and the container whose processes can be seen: another counts pids of its own."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
    except OSError:
        import psutil

        return f"boot-{int(psutil.boot_time())}"
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return boot
    return boot if namespace == _OUTERMOST else f"{boot} {namespace}"


@cache
def host() -> str:
    return platform.node() or "localhost"


def _start_ticks(pid: int) -> int | None:
    """The start time in kernel ticks since boot; nothing for a process that is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in parentheses may hold spaces and parentheses itself.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def start_time(pid: int) -> int | None:
    """A number that no other process with this pid had since the machine started, or nothing if it is not alive."""
    if os.path.isdir("/proc/self"):
        return _start_ticks(pid)
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else int(process.create_time() * 100)
    except psutil.Error:
        return None


def busy_seconds(pid: int) -> dict[tuple[int, int, int], float]:
    """How long each thread of a process has computed or waited for a core to compute on, by pid, thread and the thread's start;
    where threads cannot be looked at the process counts as one. Empty where nothing can be known."""
    if not os.path.isdir("/proc/self"):
        import psutil

        try:
            process = psutil.Process(pid)
            return {(pid, pid, int(process.create_time() * 100)): float(sum(process.cpu_times()[:2]))}
        except psutil.Error:
            return {}
    busy = {}
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            try:
                with open(f"/proc/{pid}/task/{thread}/stat", "rb") as file:
                    start = int(file.read().rpartition(b")")[2].split()[19])
                with open(f"/proc/{pid}/task/{thread}/schedstat", "rb") as file:
                    busy[pid, int(thread), start] = sum(map(int, file.read().split()[:2])) / 1e9
            except (OSError, ValueError, IndexError):  # one that is gone by now
                continue
    except OSError:
        pass
    return busy


@dataclass(frozen=True)
class Identity:
    """One process on one boot of one host."""

    pid: int
    start: int
    boot: str
    host: str

    def as_json(self) -> dict[str, Any]:
        return {"pid": self.pid, "start": self.start, "boot": self.boot, "host": self.host}

    @property
    def here(self) -> bool:
        """Whether this machine, in this boot, can see the process at all."""
        return self.host == host() and self.boot == boot_id()

    @property
    def beside(self) -> bool:
        """Whether the process is of this machine's boot, but counted in another container: a lock tells whether it lives."""
        return self.host == host() and self.boot != boot_id() and self.boot.split(" ")[0] == boot_id().split(" ")[0]

    @property
    def alive(self) -> bool:
        """True only where the process can be seen and is the very same one."""
        return self.here and start_time(self.pid) == self.start


def identity(pid: int | None = None) -> Identity | None:
    """The identity of a living process (this one by default)."""
    pid = os.getpid() if pid is None else pid
    start = start_time(pid)
    return None if start is None else Identity(pid, start, boot_id(), host())


def identity_from(mapping: object) -> Identity | None:
    """An identity read from a file that may be damaged."""
    if not isinstance(mapping, dict):
        return None
    pid, start, boot, name = (mapping.get(key) for key in ("pid", "start", "boot", "host"))
    if not (isinstance(pid, int) and isinstance(start, int) and isinstance(boot, str) and isinstance(name, str)):
        return None
    return Identity(pid, start, boot, name) if pid > 0 else None


def carries(pid: int, mark: str) -> bool:
    """Whether the process was started with this `NAME=value` in its environment; False where that may not be read."""
    if not os.path.isdir("/proc/self"):
        import psutil

        name, _, value = mark.partition("=")
        try:
            return psutil.Process(pid).environ().get(name) == value
        except psutil.Error:
            return False
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark.encode() in file.read().split(b"\0")
    except OSError:
        return False


def send(to: Identity, number: int) -> bool:
    """Signal the process if it is still the same one; tells whether the signal went out."""
    if not to.alive:
        return False
    try:
        os.kill(to.pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
