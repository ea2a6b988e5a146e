"""A child for each long question, forked from the warm process, so that cancelling is killing and limits are the kernel's.

The child inherits what is warm and writes its progress and its answer to a pipe; `relay` passes them on, and a child that
dies without an answer is an answer too. It ends with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.errors import WorkbenchError
from engine.figures import unit_of
from engine.inspector.answers import Answers

Params = dict[str, Any]
Report = Callable[[str, int, int], None]

PROGRESS_EVERY = 0.1


@dataclass
class Task:
    """One question on its way: waiting, or running in the child `pid`."""

    number: int
    params: Params
    pid: int | None = None
    cancelled: bool = False

    def kill(self) -> None:
        """Ends the child where there is one."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


@dataclass
class Job:
    """Work for a child; `report` may be called often. The limits, seconds of computing and bytes beyond what the process
    has, are for what strangers' templates may use."""

    run: Callable[[Report], Any]
    seconds: int | None = None
    memory: int | None = None
    learn: Callable[[Any], None] | None = None
    """Told the child's result here, where it can be kept for the questions to come."""


def fork(job: Job, task: Task) -> int:
    """Start the child; the descriptor that its messages come from."""
    reading, writing = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.close(writing)
        task.pid = pid
        if task.cancelled:
            task.kill()
        return reading
    code = 1
    try:
        os.close(reading)
        _die_with(parent)
        _limit(job)
        _child(job, task.number, writing)
        code = 0
    finally:
        os._exit(code)


def _child(job: Job, number: int, writing: int) -> None:
    answers, last = Answers(writing), [0.0]

    def report(what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - last[0] >= PROGRESS_EVERY or 0 < total <= done:
            last[0] = now
            answers.send(number, progress={"what": what, "done": done, "total": total, "unit": unit_of(what)})

    try:
        result = job.run(report)
    except BaseException as problem:  # noqa: BLE001 - the process boundary: the error belongs to its question
        answers.fail(number, problem)
    else:
        answers.send(number, result=result)


def _die_with(parent: int) -> None:
    """On Linux the kernel ends the child when the inspector is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _limit(job: Job) -> None:
    if job.seconds:
        resource.setrlimit(resource.RLIMIT_CPU, (job.seconds, job.seconds + 1))
    if job.memory and sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + job.memory, used + job.memory))


def relay(reading: int, job: Job, task: Task, tasks: dict[int, Task], answers: Answers) -> None:
    """Pass the child's lines on; a child that dies without an answer is an answer too."""
    answered = False
    with os.fdopen(reading, "rb") as lines:
        for line in lines:
            if not task.cancelled and line.endswith(b"\n"):
                message = json.loads(line)
                answered = answered or "progress" not in message
                if job.learn and "result" in message:
                    job.learn(message["result"])
                answers.send(message.pop("id"), **message)
    assert task.pid is not None
    _, status = os.waitpid(task.pid, 0)
    task.pid = None
    tasks.pop(task.number, None)
    if not answered and not task.cancelled:
        what = f"the {task.params.get('do')} ended without an answer: {_cause(status, job)}"
        answers.fail(task.number, WorkbenchError(what))


def _cause(status: int, job: Job) -> str:
    """Why a child with this wait status ended, in words."""
    if not os.WIFSIGNALED(status):
        return f"exit code {os.WEXITSTATUS(status)}"
    ended_by = os.WTERMSIG(status)
    if job.seconds and ended_by in (signal.SIGXCPU, signal.SIGKILL):
        return f"it took more than {job.seconds} seconds of computing or too much memory"
    if ended_by == signal.SIGKILL:
        return "it was killed, most likely because the machine's memory ran out"
    return f"signal {ended_by}"
