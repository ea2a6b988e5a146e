"""The right to be a run's one worker: a kernel lock on `run.lock`, or a heartbeat where such locks do not hold, in a job
of a cluster, and in a run on several nodes, which are looked at from other hosts.

The lock is close-on-exec, so loader processes never keep it alive after their owner. The file also names its owner.
A free kernel lock beside a living owner means that locks do not hold here (network homes): the owner's record then
decides, and its file's age by the file system's own clock where the owner is on another host.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import threading
import time
from pathlib import Path
from typing import Any

from engine.errors import RunBusy, visible
from engine.run import inside
from engine.run.inside import UnsafeRunFile
from engine.run.nodes import rendezvous_of
from engine.run.process import host, identity, identity_from
from engine.run.store import RunFolder

BEAT_SECONDS = 5.0
STALE_SECONDS = 30.0
_RECORD_BYTES = 512
_NOT_SUPPORTED = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF, errno.EIO}
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "fuse.sshfs", "9p", "lustre", "gpfs", "beegfs", "ceph", "afs"}


def try_flock(handle: int) -> str:
    """`held` (now ours), `busy` (another holds it) or `unsupported` (locks do not work on this file system)."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as problem:
        if problem.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return "busy"
        if problem.errno in _NOT_SUPPORTED:
            return "unsupported"
        raise
    return "held"


def file_system(path: Path) -> str:
    """The type of the file system that holds `path`, as /proc/mounts names it; empty where that is not known."""
    best, kind = "", ""
    try:
        with open("/proc/mounts", encoding="utf-8", errors="replace") as file:
            for line in file:
                _, point, name, *_ = line.split(" ")
                point = point.replace("\\040", " ")
                if os.path.commonpath([point, path.absolute()]) == point and len(point) >= len(best):
                    best, kind = point, name
    except (OSError, ValueError):
        return ""
    return kind


class RunLock:
    """Held from `acquire` to `release` or the end of the process. `how` tells whether the kernel or a heartbeat holds it."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.how = ""
        self._handle = -1
        self._token = secrets.token_hex(8)
        self._stop = threading.Event()

    def acquire(self, settle: float = 0.3) -> RunLock:
        """Take the lock or raise RunBusy at once. `settle`: how long a heartbeat lock waits to see a rival's claim."""
        handle = inside.open_file(self.folder, self.folder.lock, os.O_RDWR | os.O_CREAT)
        try:
            kernel = try_flock(handle)
            record = _read(handle)
            if kernel == "busy" or _owner_lives(record, self.folder, handle):
                raise RunBusy(_busy_text(self.folder, record), "Stop it first, or watch it.")
            shared = file_system(self.folder.path) in _NETWORK or "SLURM_JOB_ID" in os.environ
            shared = shared or rendezvous_of(self.folder).nodes > 1
            self.how = "flock" if kernel == "held" and not shared else "heartbeat"
            self._write(handle)
            if self.how == "heartbeat":
                time.sleep(settle)
                if _read(handle).get("token") != self._token:
                    raise RunBusy(_busy_text(self.folder, _read(handle)), "Another process claimed it at this moment.")
        except BaseException:
            os.close(handle)
            raise
        self._handle = handle
        if self.how == "heartbeat":
            threading.Thread(target=self._beat, name="run-lock-heartbeat", daemon=True).start()
        return self

    def acquire_soon(self, patience: float = 5.0) -> RunLock:
        """As `acquire`, after so many seconds at most: a dead worker's lock is free at once, its children's a little later."""
        give_up = time.monotonic() + patience
        while True:
            try:
                return self.acquire()
            except RunBusy:
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.05)

    def release(self) -> None:
        if self._handle >= 0:
            self._stop.set()
            os.pwrite(self._handle, b" " * _RECORD_BYTES, 0)
            os.close(self._handle)
            self._handle = -1

    def __enter__(self) -> RunLock:
        return self if self._handle >= 0 else self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _write(self, handle: int) -> None:
        me = identity()
        assert me is not None
        record = {**me.as_json(), "how": self.how, "token": self._token, "file": _file(handle)}
        text = json.dumps(record).encode()
        self.folder.with_ballast(lambda: self._put(handle, text))

    @staticmethod
    def _put(handle: int, text: bytes) -> None:
        # Padded rather than cut: a file that keeps its one block can be written on a full disk too.
        os.pwrite(handle, text.ljust(_RECORD_BYTES), 0)
        os.fsync(handle)

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            try:
                os.utime(self._handle)
            except OSError:
                # A network file system that is away for a moment; the next beat tries again.
                continue


def _read(handle: int) -> dict[str, Any]:
    try:
        holder = json.loads(os.pread(handle, 4096, 0))
    except (OSError, ValueError, RecursionError):
        return {}
    return holder if isinstance(holder, dict) else {}


def _file(handle: int) -> list[int]:
    info = os.fstat(handle)
    return [info.st_dev, info.st_ino]


def _owner_lives(record: dict[str, Any], folder: RunFolder, handle: int) -> bool:
    """Whether the record's owner is another living process, however the kernel lock looks. A copied file has none."""
    owner, here = identity_from(record), _file(handle)
    if owner is None:
        return False
    there = record.get("file", here)
    if owner.host == host() and owner.here:  # a container of the same name, too, has pids of its own
        return there == here and owner.pid != os.getpid() and owner.alive
    # A network file system has another device number on each host; the inode is the same.
    if not isinstance(there, list) or there[1:] != here[1:]:
        return False
    return record.get("how") == "heartbeat" and _age(folder, handle) < STALE_SECONDS


def _age(folder: RunFolder, lock: int) -> float:
    """Seconds since the last beat, by the clock of the file system that holds the file."""
    name = f".clock-{os.getpid()}-{secrets.token_hex(4)}"
    handle = inside.open_file(folder, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        return os.fstat(handle).st_mtime - os.fstat(lock).st_mtime
    finally:
        os.close(handle)
        inside.remove(folder, name)


def _busy_text(folder: RunFolder, record: dict[str, Any]) -> str:
    owner = identity_from(record)
    who = f"process {owner.pid} on {visible(owner.host)}" if owner else "another process"
    return f"run {visible(folder.id)} is held by {who}."


def is_held(folder: RunFolder) -> bool:
    """Whether a living process holds the run's lock; never disturbs the owner."""
    return holder(folder) is not None


def holder(folder: RunFolder) -> dict[str, Any] | None:
    """The record of the living process that holds the run's lock (empty where it wrote none); None where none does."""
    try:
        handle = inside.open_file(folder, folder.lock, os.O_RDWR)
    except (OSError, UnsafeRunFile):
        return None
    try:
        held = try_flock(handle) == "busy"
        record = _read(handle)
        return record if held or _owner_lives(record, folder, handle) else None
    finally:
        os.close(handle)
