"""The training's end of the process that runs reward functions: batches out, numbers in, within a time limit.

A function that raises, hangs, dies or answers wrongly becomes one `WorkbenchError` that names it and, where it is known,
the row. Nothing is tried again: a run whose rewards cannot be trusted must end.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from engine.config.reward_specs import RewardSpec
from engine.errors import WorkbenchError, redact, visible
from engine.run.spawn import safe_python

PLACE = "method.reward_funcs"
LOAD_SECONDS = (
    60.0  # a process starts and imports what it needs once, which a short limit for one call is not meant for
)
_TODO = {
    "numbers": "Return one finite number, or None where it does not apply, for each completion.",
    "hangs": "Make it faster, or raise method.reward_timeout.",
    "arguments": "Take completions and the columns that it needs by these names, and **columns for the rest.",
    "raises": "Its traceback is in the run's log. An answer may be any text, also an empty one.",
}
_BY_WORD = {"raised": "raises", "takes": "arguments"}


class RewardFunctions:
    """All built-in rewards and Python functions of a run, in one process of their own."""

    def __init__(self, specs: Sequence[RewardSpec], timeout: float) -> None:
        self.specs, self.timeout = list(specs), timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""

    def start(self) -> None:
        """Starts the process and loads every function. Raises WorkbenchError for one that cannot be."""
        if self._process is not None or not self.specs:
            return
        environment = {**os.environ, **safe_python(os.environ), "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-P", "-m", "engine.rewards.process"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        for spec in self.specs:
            seconds = max(self.timeout, LOAD_SECONDS)
            answer = self._ask(spec, {"load": [spec.text]}, "while it was loaded", seconds)
            if "problem" in answer:
                problem = visible(redact(answer["problem"]))
                raise WorkbenchError(f"{PLACE}: {named(spec)} {problem}.", _to_load(spec, problem))

    def score(self, number: int, batch: Mapping[str, Sequence[Any]], rows: Sequence[int]) -> list[float | None]:
        """What function `number` gives for a batch of columns, `completions` among them. Raises WorkbenchError."""
        self.start()
        spec = self.specs[number]
        answer = self._ask(spec, {"function": number, "batch": dict(batch)}, f"on {_those(rows)}", self.timeout)
        if "problem" not in answer:
            return list(answer["values"])
        place = answer.get("row")
        where = f" (row {rows[place]} of the data)" if isinstance(place, int) else ""
        problem = visible(redact(answer["problem"]))
        todo = _TODO[next((kind for word, kind in _BY_WORD.items() if problem.startswith(word)), "numbers")]
        raise WorkbenchError(f"{PLACE}: {named(spec)} {problem}{where}.", todo)

    def close(self) -> None:
        """Ends the process, also one that hangs."""
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()
        try:
            process.wait(1.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _ask(self, spec: RewardSpec, request: dict[str, Any], where: str, seconds: float) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            line = self._line(time.monotonic() + seconds)
        except TimeoutError:  # an OSError of its own kind, so it comes first
            self.close()
            raise WorkbenchError(
                f"{PLACE}: {named(spec)} did not return within {seconds:g} seconds {where}.", _TODO["hangs"]
            ) from None
        except OSError:
            line = b""
        if not line:
            process = self._process
            self.close()
            code = process.returncode
            raise WorkbenchError(
                f"{PLACE}: {named(spec)} ended its process (exit code {code}) {where}.",
                "Let it return numbers instead.",
            )
        return dict(json.loads(line))

    def _line(self, until: float) -> bytes:
        """One answer; empty when the process has ended."""
        assert self._process is not None
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            ready, _, _ = select.select([pipe], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError
            data = os.read(pipe, 1 << 16)
            if not data:
                return b""
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line


def named(spec: RewardSpec) -> str:
    """What messages call a reward."""
    if spec.kind == "function":
        return visible(redact(f"{os.path.basename(spec.argument)}:{spec.function}"))
    if spec.kind == "model":
        return visible(redact(f"the reward model {spec.argument}"))
    return spec.kind


def _to_load(spec: RewardSpec, problem: str) -> str:
    """What to do about a reward that could not be loaded."""
    if spec.kind != "function":
        return "Mend what stands after its colon; a file's path starts at the config's folder."
    if "cannot be imported" in problem:
        return "Its traceback is in the run's log; the file is run by this Python, in a process of its own."
    return "Name a Python file, from the config's folder, and after the colon a function in it."


def _those(rows: Sequence[int]) -> str:
    low, high = min(rows), max(rows)
    return f"row {low} of the data" if low == high else f"{len(rows)} answers to rows {low} to {high} of the data"
