"""The training's end of the processes that run reward functions: batches out, numbers in, within a time limit.

Each function has a process and pipes of its own, and each question a mark that its answer must carry; what else comes
through a pipe ends the run. A function that raises, hangs, dies or answers wrongly becomes one `WorkbenchError` that names it and, where it is known,
the row. Nothing is tried again: a run whose rewards cannot be trusted must end.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from typing import Any

from engine.config.reward_specs import RewardSpec
from engine.errors import WorkbenchError, redact, visible
from engine.run.spawn import TOKEN, for_rewards, safe_python, without_tokens

PLACE = "method.reward_funcs"
LOAD_SECONDS = (
    60.0  # a process starts and imports what it needs once, which a short limit for one call is not meant for
)
LOOK = 0.2
"""Seconds after which a process that is silent is asked whether it still lives."""
LONGEST_ANSWER = 64 << 20
_TODO = {
    "numbers": "Return one finite number, or None where it does not apply, for each completion.",
    "hangs": "Make it faster, or raise method.reward_timeout.",
    "arguments": "Take completions and the columns that it needs by these names, and **columns for the rest.",
    "raises": "Its traceback is in the run's log. An answer may be any text, also an empty one.",
}
_BY_WORD = {"raised": "raises", "takes": "arguments"}


class RewardFunctions:
    """All built-in rewards and Python functions of a run, each in a process of its own: none can answer for another."""

    def __init__(self, specs: Sequence[RewardSpec], timeout: float) -> None:
        self.specs, self.timeout = list(specs), timeout
        self._processes: list[_Process] = []
        self._turn = threading.Lock()
        """One question at a time, whichever thread asks."""

    def start(self) -> None:
        """Starts the processes and loads every function. Raises WorkbenchError for one that cannot be."""
        if self._processes:
            return
        self._processes = [_Process(spec) for spec in self.specs]
        for spec, process in zip(self.specs, self._processes, strict=True):
            seconds = max(self.timeout, LOAD_SECONDS)
            answer = self._ask(process, {"load": [spec.text]}, "while it was loaded", seconds)
            if "problem" in answer:
                problem = visible(redact(str(answer["problem"])))
                raise WorkbenchError(f"{PLACE}: {named(spec)} {problem}.", _to_load(spec, problem))

    def score(self, number: int, batch: Mapping[str, Sequence[Any]], rows: Sequence[int]) -> list[float | None]:
        """What function `number` gives for a batch of columns, `completions` among them. Raises WorkbenchError."""
        with self._turn:
            self.start()
            spec, process = self.specs[number], self._processes[number]
            answer = self._ask(process, {"function": 0, "batch": dict(batch)}, f"on {_those(rows)}", self.timeout)
        values = answer.get("values")
        if "problem" not in answer:
            if not _believable(values, len(batch["completions"])):
                self.close()
                raise _forged(spec)
            return list(values or ())
        place = answer.get("row")
        where = f" (row {rows[place]} of the data)" if type(place) is int and 0 <= place < len(rows) else ""
        problem = visible(redact(str(answer["problem"])))
        todo = _TODO[next((kind for word, kind in _BY_WORD.items() if problem.startswith(word)), "numbers")]
        raise WorkbenchError(f"{PLACE}: {named(spec)} {problem}{where}.", todo)

    def interrupt(self) -> None:
        """Ends the processes, so that a thread that waits for one waits no longer."""
        for process in self._processes:
            process.process.kill()

    def close(self) -> None:
        """Ends the processes, also those that hang."""
        processes, self._processes = self._processes, []
        for process in processes:
            process.leave()
        for process in processes:
            process.end()

    def _ask(self, process: _Process, request: dict[str, Any], where: str, seconds: float) -> dict[str, Any]:
        try:
            return process.ask(request, where, seconds)
        except WorkbenchError:
            self.close()
            raise


class _Process:
    """One function's process. Its answers are believed only as answers to what it was asked last."""

    def __init__(self, spec: RewardSpec) -> None:
        self.spec = spec
        keep = (TOKEN, *for_rewards(os.environ))  # by the run's token its supervisor finds what it must end
        environment = {**without_tokens(os.environ, keep), **safe_python(os.environ), "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-P", "-m", "engine.rewards.process"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._in, self._out = self.process.stdin, self.process.stdout
        self._unread = b""

    def ask(self, request: dict[str, Any], where: str, seconds: float) -> dict[str, Any]:
        """Its answer. Raises WorkbenchError where none comes in time, or one that was not asked for."""
        mark = secrets.token_hex(8)
        try:
            if self._unread or (wait([self._out.fileno()], 0) and self.process.poll() is None):
                raise _forged(self.spec)
            self._in.write(json.dumps({**request, "mark": mark}).encode() + b"\n")
            self._in.flush()
            line = self._line(time.monotonic() + seconds)
        except TimeoutError:  # an OSError of its own kind, so it comes first
            raise WorkbenchError(
                f"{PLACE}: {named(self.spec)} did not return within {seconds:g} seconds {where}.", _TODO["hangs"]
            ) from None
        except OSError:
            line = b""
        if not line:
            self.leave()
            self.end()
            code = self.process.returncode
            raise WorkbenchError(
                f"{PLACE}: {named(self.spec)} ended its process (exit code {code}) {where}.",
                "Let it return numbers instead.",
            )
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict) or answer.get("mark") != mark or self._unread:
            raise _forged(self.spec)
        return answer

    def leave(self) -> None:
        """Tells it that nothing more will be asked."""
        for pipe in (self._in, self._out):
            with contextlib.suppress(OSError):
                pipe.close()

    def end(self) -> None:
        """Waits for its end, and brings it about where it hangs."""
        try:
            self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _line(self, until: float) -> bytes:
        """One answer; empty when the process has ended, though something that it started may hold its pipe open."""
        pipe = self._out.fileno()
        while b"\n" not in self._unread:
            ended = self.process.poll() is not None
            ready = wait([pipe], 0 if ended else max(0.0, min(LOOK, until - time.monotonic())))
            if ready:
                data = os.read(pipe, 1 << 16)
                if not data:
                    return b""
                self._unread += data
                if len(self._unread) > LONGEST_ANSWER:
                    raise _forged(self.spec)
            elif ended:
                return b""
            elif time.monotonic() >= until:
                raise TimeoutError
        line, _, self._unread = self._unread.partition(b"\n")
        return line


def _believable(values: Any, count: int) -> bool:
    """Whether these are the numbers that a function's own process lets through: finite or None, one an answer."""
    return (
        isinstance(values, list)
        and len(values) == count
        and all(score is None or (type(score) in (int, float) and math.isfinite(score)) for score in values)
    )


def _forged(spec: RewardSpec) -> WorkbenchError:
    return WorkbenchError(
        f"{PLACE}: {named(spec)} wrote into the pipe that its answers go through, so its rewards cannot be believed.",
        "Let it return numbers, and print what is for the log.",
    )


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
