"""`python -P -m engine.export`: does one export, read as a line of JSON, and tells of it in lines of JSON.

It ends, and takes away what is half written, on SIGTERM and when its input closes, that is when whoever asked is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from engine.errors import WorkbenchError, redact, visible
from engine.model_files import SHARES

PROGRESS_SECONDS = 0.1


class _Ended(BaseException):
    """Whoever asked has gone or cancelled."""


def main() -> int:
    """Reads the request, answers, and returns the exit code."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print goes to the log
    signal.signal(signal.SIGTERM, _end)
    asked = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()

    def send(**message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            out.write(json.dumps(message) + "\n")
            out.flush()

    try:
        send(result=answer(asked, send))
    except _Ended:
        return 143
    except Exception as problem:  # noqa: BLE001 - the process boundary
        send(error=described(problem))
        return 1
    return 0


def _end(number: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _Ended


def _end_with_input() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def described(problem: Exception) -> dict[str, str]:
    """A problem as its person sees it; the details of one of ours go to the log."""
    if isinstance(problem, WorkbenchError):
        return {"message": problem.message, "hint": problem.hint}
    traceback.print_exc(file=sys.stderr)
    if isinstance(problem, MemoryError) or "can't allocate memory" in str(problem):
        return {"message": "this machine has too little memory for the export.", "hint": "Close other programs."}
    first = (str(problem).strip().splitlines() or [""])[0]
    return {"message": visible(redact(f"{type(problem).__name__}: {first}"))[:500], "hint": ""}


def answer(asked: dict[str, Any], send: Any) -> dict[str, Any]:
    """Does what is asked; a part that fails leaves the others. Raises WorkbenchError where nothing can be begun."""
    last = [0.0]

    def report(what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - last[0] >= PROGRESS_SECONDS or done >= total or not done:
            last[0] = now
            send(progress={"what": what, "done": done, "total": total, "unit": "bytes" if total > 1 else ""})

    report("Reading the checkpoint", 0, 1)
    from engine.export.places import source
    from engine.run.store import RunFolder

    run = RunFolder(asked["run"])
    taken = source(run, asked["checkpoint"])
    if asked["do"] == "merge" and not (taken.adapted or (taken.checkpoint / SHARES).is_dir()):
        raise WorkbenchError(
            f"{taken.checkpoint.name}: holds all weights of the model and no adapter, so there is nothing to merge.",
            f"It is a model as it is: `workbench export {visible(run.id)} --to safetensors` takes it along.",
        )
    report("Loading the libraries", 0, 1)
    from engine.compat import import_warnings

    with import_warnings.dropped():
        from engine.export.folder import Model
        from engine.export.making import make
        from engine.export.shards import put_together
    with put_together(taken, Path(next(iter(asked["places"].values())))) as taken:
        parts = _parts(Model(taken, _config(run)), asked, make, report, send)
    return {"run": run.id, "checkpoint": taken.checkpoint.name, "parts": parts}


def _parts(model: Any, asked: dict[str, Any], make: Any, report: Any, send: Any) -> list[dict[str, Any]]:
    """Each form that is asked for, made; one that fails leaves the others."""
    parts = []
    for form, place in asked["places"].items():
        try:
            part = make(model, form, Path(place), asked, report)
            if asked["do"] == "push":
                from engine.export.push import upload

                part["url"] = upload(Path(place), asked["repository"], private=asked["private"], report=report)
        except Exception as problem:  # noqa: BLE001 - a part that fails leaves the others
            part = {"form": form, "path": place, "ok": False, "error": described(problem)}
        if part["ok"] and form == "safetensors":
            model.merged = Path(place)
        parts.append(part)
        send(part=part)
    return parts


def _config(run: Any) -> Any:
    """The run's config as it was launched. Raises WorkbenchError with the first error in it."""
    from engine.config.files import parse
    from engine.rules import read

    reading = read(parse(run.read_config(), path=run.config).mapping)
    for finding in reading.findings:
        if finding.severity == "error":
            raise WorkbenchError(finding.message)
    return reading.config


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)
