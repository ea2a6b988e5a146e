"""The process that prepares the shards of a stream ahead of training, never more of them than the disk may hold.

It is forked once, before there is a model, and goes where training is: of the shards that come next it makes the first that
is missing, and shards that training has left behind make room. It ends with the process that started it. A source that
fails is told when training comes to that very shard, so a run fails at the same row whenever it runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from multiprocessing.connection import wait as readable
from typing import Any, NoReturn

from engine.data.rendering import close_others
from engine.data.streaming.order import Walk
from engine.data.streaming.shards import Key, Note, ShardFolder, ShardMaker
from engine.errors import DataError, WorkbenchError

AHEAD = 64
"""Shards that are prepared beyond the one that is read."""
LOOK_SECONDS = 1.0
NICE = 5


class Producer:
    """The child as training sees it."""

    def __init__(self, make: Callable[[], ShardMaker], walk: Walk, epochs: int | None, disk: int) -> None:
        """`epochs` is how many of them are read, None for no end; `disk` the bytes that shards may take."""
        self.reading = ""
        """The file that is being prepared."""
        self.status: int | None = None
        """How it ended, once it has."""
        self._failed: dict[Key, WorkbenchError] = {}
        self._buffer = b""
        self._mine, theirs = socket.socketpair()
        parent = os.getpid()
        self._pid = os.fork()
        if not self._pid:
            _child(theirs, parent, make, walk, epochs, disk)
        theirs.close()
        self._mine.setblocking(False)

    def go_to(self, state: dict[str, Any], held: list[Key]) -> None:
        """Training is at `state` and still needs the shards `held`."""
        with contextlib.suppress(OSError):
            self._mine.setblocking(True)
            self._mine.sendall(json.dumps({"state": state, "held": held}).encode() + b"\n")
        with contextlib.suppress(OSError):
            self._mine.setblocking(False)

    def wait(self, seconds: float) -> bool:
        """Wait for news so long at most; whether there were any."""
        if self.status is not None or not readable([self._mine], seconds):
            return False
        try:
            found = self._mine.recv(1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            found = b""
        if not found:
            self.status = os.waitpid(self._pid, 0)[1]
            return True
        *lines, self._buffer = (self._buffer + found).split(b"\n")
        for line in lines:
            message = json.loads(line)
            self.reading = message.get("reading", self.reading)
            if "failed" in message:
                self._failed[tuple(message["key"])] = _error(message["failed"])
        return True

    def refuse(self, key: Key) -> None:
        """Raises the error of a shard that could not be prepared."""
        if key in self._failed:
            raise self._failed[key]

    def close(self) -> None:
        """End the child."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                self.status = os.waitpid(self._pid, 0)[1]
            self.status = self.status or 0
        self._mine.close()


def _error(found: dict[str, Any]) -> WorkbenchError:
    if not found["data"]:
        return WorkbenchError(found["message"], found["hint"])
    error = DataError(found["message"], found["hint"])
    error.path, error.line = found["path"], found["line"]
    return error


# -- the child ---------------------------------------------------------------------------------------------------------
def _child(
    mine: socket.socket, parent: int, make: Callable[[], ShardMaker], walk: Walk, epochs: int | None, disk: int
) -> NoReturn:
    try:
        _alone(mine.fileno(), parent)
        _Preparing(mine, parent, make(), walk, epochs, disk).run()
    except (BrokenPipeError, ConnectionError):
        os._exit(0)
    except BaseException:  # noqa: BLE001 - the process boundary: the log has the lines, training the end of the pipe
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


def _alone(kept: int, parent: int) -> None:
    """No open file of the parent, none of its signals, and an end with it."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        close_others(kept)
    if os.getppid() != parent:
        os._exit(0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # A library that was used before the fork would wait for threads that are not here.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.nice(NICE)


class _Preparing:
    def __init__(
        self, mine: socket.socket, parent: int, maker: ShardMaker, walk: Walk, epochs: int | None, disk: int
    ) -> None:
        self._mine, self._parent, self._maker = mine, parent, maker
        self._folder: ShardFolder = maker.folder
        self._walk, self._epochs, self._disk = walk, epochs, disk
        self._held: list[Key] = []
        self._failed: set[Key] = set()
        self._notes: dict[Key, Note] = {}
        self._sizes = self._folder.all()
        self._left: dict[Key, None] = {}
        """Shards that training has read and needs no more, in that order."""
        self._buffer = b""

    def run(self) -> None:
        """Make what is missing, and wait where nothing is."""
        while True:
            key, window = self._missing()
            if key is None or not self._has_room(key, window):
                self._listen(wait=True)
                continue
            self._make(key)
            self._listen(wait=False)

    def _missing(self) -> tuple[Key | None, list[Key]]:
        """The first shard from where training is that is not there; and all up to it."""
        walk, window = self._walk.copy(), list[Key]()
        empty = False
        while len(window) < AHEAD:
            pick = walk.next()
            if pick is None:
                walk.begin(walk.epoch + 1)
                if empty or (self._epochs is not None and walk.epoch >= self._epochs):
                    break
                empty = True
                continue
            empty = False
            key = (pick.file, pick.shard)
            window.append(key)
            if key in self._failed:
                break
            note = self._note(key)
            if note is None:
                return key, window
            walk.pass_by(pick, note.last)
        return None, window

    def _note(self, key: Key) -> Note | None:
        """What is known of a shard that is there; others may take shards away."""
        if not self._folder.has(key):
            self._notes.pop(key, None)
            return None
        if key not in self._notes and (note := self._folder.note(key)) is not None:
            self._notes[key] = note
        return self._notes.get(key)

    def _has_room(self, wanted: Key, window: list[Key]) -> bool:
        """Whether another shard may be made, once those are gone that nobody needs."""
        if sum(self._sizes.values()) <= self._disk:
            return True
        needed = {*window, *self._held}
        unneeded = [key for key in self._left if key not in needed]
        unneeded += [key for key in self._sizes if key not in needed and key not in self._left]
        for key in unneeded:
            self._folder.remove(key)
            self._sizes.pop(key, None)
            self._left.pop(key, None)
            self._notes.pop(key, None)
            if sum(self._sizes.values()) <= self._disk:
                return True
        # The very next one is made whatever it takes.
        return window[0] == wanted

    def _make(self, key: Key) -> None:
        self._send({"reading": self._maker.plan.sources[key[0]].path})
        try:
            self._notes[key] = self._maker.make(key)
            self._sizes[key] = self._notes[key].bytes
            self._send({"made": key})
        except WorkbenchError as problem:
            self._failed.add(key)
            told = {"message": problem.message, "hint": problem.hint, "data": isinstance(problem, DataError)}
            place = {name: getattr(problem, name, None) for name in ("path", "line")}
            self._send({"failed": {**told, **place}, "key": key})

    def _send(self, message: dict[str, Any]) -> None:
        self._mine.sendall(json.dumps(message).encode() + b"\n")

    def _listen(self, *, wait: bool) -> None:
        """Take up where training is now. Raises ConnectionError once it is gone."""
        while not readable([self._mine], LOOK_SECONDS if wait else 0):
            if os.getppid() != self._parent:
                raise ConnectionError
            if not wait:
                return
        found = self._mine.recv(1 << 20)
        if not found:
            raise ConnectionError
        *lines, self._buffer = (self._buffer + found).split(b"\n")
        for line in lines:
            message = json.loads(line)
            held = [(int(file), int(shard)) for file, shard in message["held"]]
            for key in self._held:
                if key not in held:
                    self._left.pop(key, None)
                    self._left[key] = None
            self._held = held
            self._walk.go_to(message["state"])
