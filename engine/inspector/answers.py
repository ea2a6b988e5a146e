"""What a process that answers reads and writes: whole JSON lines, each with the number of its question, and what failed as a person sees it."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from typing import Any

from engine.errors import WorkbenchError, redact


class Answers:
    """Writes whole lines to a descriptor, from any thread."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._lock = descriptor, threading.Lock()

    def send(self, number: int, **payload: Any) -> None:
        line = json.dumps({"id": number, **payload}, default=str, ensure_ascii=True).encode() + b"\n"
        with self._lock:
            while line:
                line = line[os.write(self._descriptor, line) :]

    def questions(self, descriptor: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """Number and content of each question that comes in, until the other end is gone; what is none is answered with why."""
        with os.fdopen(os.dup(descriptor), "rb") as lines:
            for line in lines:
                try:
                    question = json.loads(line)
                    number = int(question["id"])
                except (ValueError, KeyError, TypeError) as problem:
                    self.fail(-1, problem)
                else:
                    yield number, question

    def fail(self, number: int, problem: BaseException) -> None:
        self.send(number, error=describe(problem))


def describe(problem: BaseException) -> dict[str, str]:
    """A problem as its person sees it; one that we did not foresee names its type."""
    if isinstance(problem, WorkbenchError):
        return {"message": problem.message, "hint": problem.hint, "kind": type(problem).__name__}
    if isinstance(problem, MemoryError):
        return {"message": "this needs more memory than the preview may use", "hint": "", "kind": "MemoryError"}
    text = redact(str(problem)).strip().splitlines()
    message = f"{type(problem).__name__}: {text[0] if text else 'no message'}"
    return {"message": message, "hint": "", "kind": type(problem).__name__}
