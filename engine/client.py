"""The frontends' end of the inspector: starts it on first use, asks, hears progress, cancels.

The inspector is a process of its own because it needs torch; this side is the standard library alone. An answer belongs to
its ticket. If the inspector dies, open tickets fail with one sentence and the next question starts a new one. A cancelled
ticket is answered here at once, whatever the other side is doing.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from typing import IO, Any

from engine.errors import Cancelled, WorkbenchError, redact, visible
from engine.run.spawn import ALL_TOKENS, without_tokens

Progress = Callable[[dict[str, Any]], None]
COMMAND = (sys.executable, "-P", "-m", "engine.inspector")
ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONSAFEPATH": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


class Ticket:
    """One question. `result` waits for its answer; callbacks run on the client's reader thread."""

    def __init__(self, client: Inspector, number: int, on_progress: Progress | None) -> None:
        self._client, self._number, self._on_progress = client, number, on_progress
        self._ready = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Ticket], object]] = []
        self._value: Any = None
        self._problem: WorkbenchError | None = None

    @property
    def done(self) -> bool:
        return self._ready.is_set()

    @property
    def cancelled(self) -> bool:
        return isinstance(self._problem, Cancelled)

    @property
    def error(self) -> WorkbenchError | None:
        """What went wrong, once done."""
        return self._problem

    def result(self, timeout: float | None = None) -> Any:
        """The answer. Raises the error of the question, `Cancelled`, or `TimeoutError` when it is not there in time."""
        if not self._ready.wait(timeout):
            raise TimeoutError(f"no answer within {timeout} seconds")
        if self._problem is not None:
            raise self._problem
        return self._value

    def cancel(self) -> None:
        """Give up the question; a long job is killed. Without effect on an answered one."""
        if not self.done:
            self._client._forget(self._number)
            self._finish(None, Cancelled("cancelled"))

    def add_done_callback(self, function: Callable[[Ticket], object]) -> None:
        """Call `function(ticket)` once answered, at once when it already is."""
        with self._lock:
            if not self.done:
                self._callbacks.append(function)
                return
        function(self)

    def _progress(self, what: dict[str, Any]) -> None:
        if self._on_progress is not None and not self.done:
            self._on_progress(what)

    def _finish(self, value: Any, problem: WorkbenchError | None) -> None:
        with self._lock:
            if self.done:
                return
            self._value, self._problem = value, problem
            self._ready.set()
            callbacks, self._callbacks = self._callbacks, []
        for function in callbacks:
            function(self)


class Inspector:
    """One inspector process, started by the first question. Safe to use from any thread.

    `command` may start another process that answers in the same way: `name` is then what messages call it, and
    `environment` is put above the inspector's own.
    """

    def __init__(
        self,
        command: tuple[str, ...] = COMMAND,
        *,
        name: str = "the inspector",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._command, self._name, self._environment = command, name, dict(environment or {})
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._open: dict[int, Ticket] = {}
        self._number = 0
        self._closed = False

    def ask(self, do: str, *, on_progress: Progress | None = None, **params: Any) -> Ticket:
        """Ask for `do` with its parameters (plain JSON values)."""
        with self._lock:
            if self._closed:
                raise WorkbenchError(f"{self._name} is closed")
            self._number += 1
            ticket = Ticket(self, self._number, on_progress)
            self._open[ticket._number] = ticket
            try:
                self._start()
                self._send({"id": ticket._number, "do": do, **params})
            except OSError as problem:
                self._open.pop(ticket._number, None)
                failure = WorkbenchError(f"{self._name} cannot be reached ({problem.strerror or problem})")
            else:
                return ticket
        ticket._finish(None, failure)
        return ticket

    def close(self) -> None:
        """End the inspector and its jobs; open tickets are cancelled."""
        with self._lock:
            self._closed = True
            process, reader = self._process, self._reader
            waiting, self._open = list(self._open.values()), {}
        for ticket in waiting:
            ticket._finish(None, Cancelled(f"{self._name} was closed"))
        if process is None:
            return
        with contextlib.suppress(OSError):
            assert process.stdin is not None
            process.stdin.close()
        try:
            process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        # A signal may have come before the reader was started.
        if reader is not None and reader.is_alive() and reader is not threading.current_thread():
            reader.join(timeout=2)

    def __enter__(self) -> Inspector:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    # -- inside: called with the lock held -----------------------------------------------------------------------------
    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process; read after a crash
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**without_tokens(os.environ, ALL_TOKENS), **ENVIRONMENT, **self._environment},
            start_new_session=True,  # Ctrl-C in the terminal is for the frontend alone
        )
        self._process = process
        self._reader = threading.Thread(target=self._read, args=(process, log), name="inspector-reader", daemon=True)
        self._reader.start()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message, default=str).encode() + b"\n")
        self._process.stdin.flush()

    def _forget(self, number: int) -> None:
        with self._lock:
            self._open.pop(number, None)
            if self._process is not None and self._process.poll() is None:
                with contextlib.suppress(OSError):
                    self._send({"id": number, "do": "cancel"})

    # -- inside: the reader thread -------------------------------------------------------------------------------------
    def _read(self, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as answers, log:
            for line in answers:
                self._answer(line)
            code = process.wait()
            failure = self._epitaph(code, log)
        with self._lock:
            if self._process is process:
                self._process = None
                lost, self._open = list(self._open.values()), {}
            else:
                lost = []
        with contextlib.suppress(OSError):
            assert process.stdin is not None
            process.stdin.close()
        for ticket in lost:
            ticket._finish(None, failure)

    def _answer(self, line: bytes) -> None:
        try:
            answer = json.loads(line)
            number = answer["id"]
        except (ValueError, KeyError, TypeError):
            return  # a torn last line of a dying inspector
        with self._lock:
            ticket = self._open.get(number) if "progress" in answer else self._open.pop(number, None)
        if ticket is None:
            return
        if "progress" in answer:
            ticket._progress(answer["progress"])
        elif "error" in answer:
            ticket._finish(None, _error(answer["error"]))
        else:
            ticket._finish(answer.get("result"), None)

    def _epitaph(self, code: int, log: IO[bytes]) -> WorkbenchError:
        log.seek(0, os.SEEK_END)
        log.seek(max(log.tell() - 2000, 0))
        lines = log.read().decode("utf-8", "replace").strip().splitlines()
        last = f": {visible(redact(lines[-1]))[:200]}" if lines and code else ""
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return WorkbenchError(f"{self._name} ended ({how}){last}", "Ask again; it starts anew.")


def ask_once(do: str, *, on_progress: Progress | None = None, **params: Any) -> Any:
    """The answer of an inspector of its own; what ends the waiting, Ctrl-C say, cancels the question too."""
    with Inspector() as inspector:
        ticket = inspector.ask(do, on_progress=on_progress, **params)
        try:
            return ticket.result()
        except BaseException:
            ticket.cancel()
            raise


def _error(problem: dict[str, Any]) -> WorkbenchError:
    kind = Cancelled if problem.get("kind") == "Cancelled" else WorkbenchError
    return kind(str(problem.get("message", "")), str(problem.get("hint", "")))
