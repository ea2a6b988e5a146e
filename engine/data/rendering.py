"""A child process in which strangers' templates are compiled and rendered, so that each can be ended whatever it does.

A chat template may spend any time and memory inside one call of C, where no Python in the same process gets a word in. So
the child sets a timer whose signal the kernel answers by ending it, and has an address space of its own with a limit. It is
forked once from the process that has everything warm and serves one question after the other; one that was ended is
started anew by the next question. What it answers is JSON, never pickled: nothing that a template breaks out into comes back.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from typing import Any, NoReturn, Protocol

SECONDS, MEMORY, LOOK_SECONDS = 2.0, 512 << 20, 5.0
"""Of a processor, and bytes; how often a child that waits looks whether its parent is there."""
LONGEST = 10 * SECONDS
"""By the clock, since a machine that is busy gives little of a processor."""
AHEAD = 16 << 20
"""The most bytes of a question that is sent ahead: many at once must fit into the child's memory."""
_LENGTH = struct.Struct("<Q")
_TIMERS = signal.SIGPROF, signal.SIGALRM
_NO_MEMORY, _OWN_ERROR = 3, 1
"""How the child ends: the first by what it was asked, the second by an error of ours, which is asked once more."""


class RenderingEnded(Exception):
    """The child was ended in the middle of a question; `slow` says for its time, else for its memory."""

    def __init__(self, slow: bool) -> None:
        super().__init__("the rendering was ended")
        self.slow = slow


class Served(Protocol):
    """What the child holds: answers a question by name with plain JSON."""

    def answer(self, name: str, *arguments: Any) -> Any: ...


class Sent:
    """A question whose answer is taken later; `answer` is None until then, and where the child ended over it."""

    answer: bytearray | None = None


class Child:
    """One child and what it serves. Safe to use from any thread; in a forked process it starts a child of its own."""

    def __init__(self, make: Callable[[], Served]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._owner = 0
        self._end: weakref.finalize[..., Any] | None = None
        self._sent: Sent | None = None

    def ask(self, name: str, *arguments: Any) -> Any:
        """The answer of the child. Raises RenderingEnded."""
        self._own()
        question = pickle.dumps((name, arguments))
        with self._lock:
            self._receive_sent()
            status, answer = self._tried(question)
            if answer is None and os.WIFEXITED(status) and os.WEXITSTATUS(status) == _OWN_ERROR:
                status, answer = self._tried(question)
        if answer is None:
            raise RenderingEnded(os.WIFSIGNALED(status) and os.WTERMSIG(status) in _TIMERS)
        return json.loads(answer)

    def send(self, name: str, *arguments: Any) -> Sent:
        """Put a question that the child works on meanwhile; `take` has its answer. One too large is not sent."""
        self._own()
        sent, question = Sent(), pickle.dumps((name, arguments))
        if len(question) > AHEAD:
            return sent
        with self._lock:
            self._receive_sent()
            if self._end is None or not self._end.alive:
                self._start()
            try:
                _send(self._mine, question)
                self._sent = sent
            except OSError:
                assert self._end is not None
                self._end()
        return sent

    def take(self, sent: Sent) -> Any:
        """The answer to what was sent; None where there is none: it is to be asked in smaller pieces."""
        self._own()
        with self._lock:
            if self._sent is sent:
                self._receive_sent()
        return None if sent.answer is None else json.loads(sent.answer)

    def _own(self) -> None:
        if self._owner != os.getpid():
            # Forked with us: the pipe of the process before is not ours to speak on, and nobody will release its lock.
            self._lock, self._end, self._sent, self._owner = threading.Lock(), None, None, os.getpid()

    def _receive_sent(self) -> None:
        """Take what the child has still to say off the pipe."""
        sent, self._sent = self._sent, None
        if sent is None:
            return
        try:
            sent.answer = _receive(self._mine)
        except (EOFError, OSError):
            assert self._end is not None
            self._end()

    def _tried(self, question: bytes) -> tuple[int, bytearray | None]:
        """The answer; or None and the status of the child that ended over it."""
        if self._end is None or not self._end.alive:
            self._start()
        try:
            _send(self._mine, question)
            return 0, _receive(self._mine)
        except (EOFError, OSError):
            assert self._end is not None
            return int(self._end() or 0), None

    def _start(self) -> None:
        self._mine, theirs = socket.socketpair()
        parent = os.getpid()
        pid = os.fork()
        if not pid:
            _serve(theirs, parent, self._make)
        theirs.close()
        self._end = weakref.finalize(self, _finish, self._mine, pid, parent)


def _finish(mine: socket.socket, pid: int, owner: int) -> int:
    """Close the child's end of the world and take its status; the process that did not start it leaves it alone."""
    if owner != os.getpid():
        mine.close()
        return 0
    # Closing alone would not reach the child while others that were forked from here hold the same end open.
    with contextlib.suppress(OSError):
        mine.shutdown(socket.SHUT_RDWR)
    mine.close()
    # It was ended, or ends by itself where nobody is left to ask it.
    return os.waitpid(pid, 0)[1]


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """In the child: the kernel ends it where the block takes more than `SECONDS` of a processor, or `LONGEST` by the clock."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_REAL, LONGEST)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _serve(mine: socket.socket, parent: int, make: Callable[[], Served]) -> NoReturn:
    # What the parent leaves behind is not the child's to clear away: it would close files that are meanwhile its own.
    gc.freeze()
    try:
        _alone(mine.fileno())
        served = make()
        while True:
            # Others that were forked from the parent may hold its end of the pipe open.
            while not wait([mine], LOOK_SECONDS):
                if os.getppid() != parent:
                    os._exit(0)
            name, arguments = pickle.loads(_receive(mine))  # noqa: S301 - from the process that forked this one
            _send(mine, json.dumps(served.answer(name, *arguments)).encode())
    except EOFError:
        os._exit(0)
    except MemoryError:
        os._exit(_NO_MEMORY)
    finally:
        # Also for an error of our own: the parent sees the end of the pipe.
        os._exit(_OWN_ERROR)


def close_others(kept: int) -> None:
    """No open file of the parent in a process that was forked (a lock of its run among them), but the standard streams and
    this one."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != kept:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _alone(descriptor: int) -> None:
    """No open file of the parent, no handler of its signals, and no more memory than allowed."""
    if sys.platform == "linux":
        close_others(descriptor)
        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for timer in _TIMERS:
        signal.signal(timer, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _TIMERS)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _send(to: socket.socket, data: bytes) -> None:
    to.sendall(_LENGTH.pack(len(data)) + data)


def _receive(source: socket.socket) -> bytearray:
    (length,) = _LENGTH.unpack(_exactly(source, _LENGTH.size))
    return _exactly(source, length)


def _exactly(source: socket.socket, count: int) -> bytearray:
    data, done = bytearray(count), 0
    view = memoryview(data)
    while done < count:
        got = source.recv_into(view[done:])
        if not got:
            raise EOFError
        done += got
    return data
