"""An error of ours: the details without local variables go into a log, one sentence goes to the person.

Used at both boundaries of the terminal, the commands' and the app's. The standard library and platformdirs only.
"""

from __future__ import annotations

import time
from pathlib import Path

from engine.errors import WorkbenchError, redact, visible


def state_folder() -> Path:
    """Where the app keeps its log and configs that were not saved."""
    from platformdirs import user_state_path

    return user_state_path("workbench")


def keep_details(problem: BaseException | None) -> str:
    """Append the traceback to the log; the sentence that says where, or nothing where it cannot be written."""
    import traceback  # few commands crash

    place = state_folder() / "app.log"
    text = "".join(traceback.format_exception(problem)) if problem else "unknown error\n"
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with place.open("a", encoding="utf-8") as log:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{visible(redact(text), lines=True)}\n")
    except OSError:
        return ""
    return f"The details are in {place}."


def crashed(problem: Exception) -> WorkbenchError:
    """What a command says of an error that nobody foresaw; of one of the system, which file and why."""
    details = keep_details(problem)
    if isinstance(problem, OSError) and problem.filename and problem.strerror:
        return WorkbenchError(redact(f"{problem.filename}: {problem.strerror}."), redact(details))
    words = " ".join(str(problem).split())[:300]
    sentence = f"{type(problem).__name__}: {words}" if words else type(problem).__name__
    return WorkbenchError(redact(f"The command stopped on {sentence}."), redact(details))
