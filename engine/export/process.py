"""The frontends' end of an export: starts the process that does it, reads its progress, cancels. No torch.

The process reads one request from its input and ends with it, so an export never outlives the window that asked for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine.errors import Cancelled, WorkbenchError, redact, visible
from engine.figures import percent
from engine.run.spawn import HUB_TOKENS, safe_python, without_tokens

COMMAND = (sys.executable, "-P", "-m", "engine.export")
ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    # The C library would keep the room of each weight that is done, for one of another size: twice the memory in the end.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
}
PATIENCE = 10.0
"""Seconds that a cancelled export has to take its half-written part away."""


class Export:
    """One export in a process of its own; `run` waits for it, `cancel` may be called from another thread."""

    def __init__(self, request: dict[str, Any], command: Sequence[str] = COMMAND) -> None:
        self.request, self._command = request, command
        self._process: subprocess.Popen[bytes] | None = None
        self._cancelled = False

    def run(self, on_message: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """What became of it; `on_message` is given `progress` and each finished `part`. Raises its WorkbenchError."""
        hub = HUB_TOKENS
        environment = {
            **without_tokens(os.environ, hub),
            **safe_python(os.environ),
            **ENVIRONMENT,
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
        """End it; what it was writing goes away, parts that are complete stay."""
        self._cancelled = True
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()

    def _followed(
        self, process: subprocess.Popen[bytes], log: Any, on_message: Callable[[dict[str, Any]], None]
    ) -> dict[str, Any]:
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
            raise Cancelled("Cancelled: what was being written is gone; parts that were complete are kept.")
        log.seek(0)
        lines = log.read()[-2000:].decode("utf-8", "replace").strip().splitlines()
        last = f": {visible(redact(lines[-1]))[:200]}" if lines else ""
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise WorkbenchError(f"the export ended ({how}){last}", "A signal 9 is mostly a lack of memory.")

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


def request(
    do: str, run: Path, *, checkpoint: int | None = None, places: dict[str, Path] | None = None, **more: Any
) -> dict[str, Any]:
    """What the process is asked: `do` is `merge`, `export` or `push`."""
    where = {form: str(path) for form, path in (places or {}).items()}
    return {"do": do, "run": str(run), "checkpoint": checkpoint, "places": where, **more}


def compared(parity: dict[str, Any]) -> str:
    """What a comparison found, in a sentence."""
    words = f"opened again by {parity['reader']}"
    if parity["weights"] is not None:
        words += f": {parity['weights']} weights are their source's, as are tokens and template"
    elif parity["prompts"] or parity["probes"]:
        words += f": {parity['prompts']} prompts and {parity['probes']} texts are the same"
    if parity["logits_error"] is not None:
        words += f", logits differ by {percent(parity['logits_error'], 3)} of their size (at most {percent(parity['bound'], 2)})"
        if parity["trained_effect"] is not None:
            words += f", training moved them by {percent(parity['trained_effect'], 1)}"
    return f"{words}; it stops at {' '.join(map(visible, parity['stop_tokens'])) or 'no token'}."
