"""One piece of work in a process of its own: the frontends' end, and what the process does around it. No torch.

The process reads one request from its input and ends with it, so it never outlives the window that asked: it answers in
lines of JSON, and leaves on SIGTERM and when its input closes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from engine.errors import Cancelled, WorkbenchError, redact, visible
from engine.run.spawn import HUB_TOKENS, safe_python, without_tokens

PROGRESS_SECONDS = 0.1
PATIENCE = 10.0
"""Seconds that a cancelled task has to take away what it was writing."""
ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
Message = dict[str, Any]
Send = Callable[..., None]
Report = Callable[[str, int, int], None]
"""Called with what is done, how much of it, and of how much."""


class Task:
    """One task in a process of its own; `run` waits for it, `cancel` may be called from another thread.

    `environment` comes on top of the window's own, of whose secrets those alone stay that are named.
    """

    what = "task"
    cancelled = "Cancelled."

    def __init__(
        self,
        request: Message,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        secrets: Collection[str] = HUB_TOKENS,
    ) -> None:
        self.request, self._command = request, command
        self._environment, self._secrets = dict(environment or {}), secrets
        self._process: subprocess.Popen[bytes] | None = None
        self._cancelled = False

    def run(self, on_message: Callable[[Message], None]) -> Message:
        """Its result; `on_message` is given whatever it says before. Raises its WorkbenchError."""
        environment = {
            **without_tokens(os.environ, self._secrets),
            **safe_python(os.environ),
            **ENVIRONMENT,
            **self._environment,
        }
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C in the terminal is for the command, which cancels
            )
            self._process = process
            try:
                return self._followed(process, log, on_message)
            except BaseException:
                self.cancel()
                raise
            finally:
                self._end(process)

    def cancel(self) -> None:
        """End it; what it was writing goes away."""
        self._cancelled = True
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()

    def _followed(self, process: subprocess.Popen[bytes], log: Any, on_message: Callable[[Message], None]) -> Message:
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(self.request).encode() + b"\n")
            process.stdin.flush()
        for line in process.stdout:
            with contextlib.suppress(ValueError):
                message = json.loads(line)
                if "error" in message:
                    problem = message["error"]
                    raise WorkbenchError(problem["message"], problem["hint"])
                if "result" in message:
                    return dict(message["result"])
                on_message(message)
        code = process.wait()
        if self._cancelled:
            raise Cancelled(self.cancelled)
        log.seek(0)
        lines = log.read()[-2000:].decode("utf-8", "replace").strip().splitlines()
        last = f": {visible(redact(lines[-1]))[:200]}" if lines else ""
        if code == -signal.SIGKILL:  # what the libraries wrote before has no part in it
            hint = "The system does that where memory runs out: close other programs, then start it again."
            raise WorkbenchError(f"the {self.what} ended: its process was killed.", hint)
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise WorkbenchError(f"the {self.what} ended ({how}){last}")

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# -- in the process ----------------------------------------------------------------------------------------------------
class _Ended(BaseException):
    """Whoever asked has gone or cancelled."""


def serve(answer: Callable[[Message, Send, Report], Message], what: str) -> None:
    """Read the request, send what `answer` makes of it, and leave the process. `what` is the task in a sentence."""
    code = _served(answer, what)
    sys.stderr.flush()
    os._exit(code)


def _served(answer: Callable[[Message, Send, Report], Message], what: str) -> int:
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print goes to the log
    signal.signal(signal.SIGTERM, _end)
    asked = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    last = [0.0]

    def send(**message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            out.write(json.dumps(message) + "\n")
            out.flush()

    def report(what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - last[0] >= PROGRESS_SECONDS or done >= total or not done:
            last[0] = now
            send(progress={"what": what, "done": done, "total": total, "unit": "bytes" if total > 1 else ""})

    try:
        send(result=answer(asked, send, report))
    except _Ended:
        return 143
    except Exception as problem:  # noqa: BLE001 - the process boundary
        send(error=described(problem, what))
        return 1
    return 0


def _end(number: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _Ended


def _end_with_input() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def described(problem: Exception, what: str) -> dict[str, str]:
    """A problem as its person sees it; the details of one of ours go to the log."""
    if isinstance(problem, WorkbenchError):
        return {"message": problem.message, "hint": problem.hint}
    traceback.print_exc(file=sys.stderr)
    if type(problem).__name__ == "OutOfMemoryError":
        return {"message": f"the GPU has too little free memory for the {what}.", "hint": "Stop what takes it."}
    if isinstance(problem, MemoryError) or "can't allocate memory" in str(problem):
        return {"message": f"this machine has too little memory for the {what}.", "hint": "Close other programs."}
    first = (str(problem).strip().splitlines() or [""])[0]
    return {"message": visible(redact(f"{type(problem).__name__}: {first}"))[:500], "hint": ""}
