"""A home folder for a process that has none it may write into, as in a container: most libraries keep their caches there.

A user without an entry in the system's list, `HOME=/` of `docker run --user`, a read-only root. Standard library only, but
where it is needed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

from engine.errors import WorkbenchError, visible


def provide_home(environment: MutableMapping[str, str] = os.environ) -> str:
    """Sets HOME for this process and what it starts, where caches could not be written below it: to `WORKBENCH_CACHE/home`,
    else to a folder of this user's among the temporary ones. What was done as a sentence; empty where nothing was.

    Raises WorkbenchError where there is no folder either that may be written.
    """
    home = os.path.expanduser("~")
    if os.path.isabs(home) and _may_write(Path(home) / ".cache"):
        return ""
    given = environment.get("WORKBENCH_CACHE")
    try:
        folder = Path(given).absolute() / "home" if given else Path(tempfile.gettempdir()) / f"workbench-{os.getuid()}"
        from engine.run.spawn import private_folder

        environment["HOME"] = str(private_folder(folder))
    except OSError as problem:
        place = visible(given) if given else "TMPDIR"
        raise WorkbenchError(
            f"{place}: must be a folder that may be written; got {problem.strerror or problem}. There is no home folder either.",
            "Set WORKBENCH_CACHE to one that is kept, and give a read-only container room for temporary files (--tmpfs /tmp).",
        ) from problem
    why = f"{visible(home)} may not be written" if os.path.isabs(home) else "there is no home folder"
    kept = "" if given else "; set WORKBENCH_CACHE to keep them elsewhere"
    return f"{why}: caches go to {visible(str(folder))}{kept}."


def _may_write(folder: Path) -> bool:
    """Whether this process may write into a folder, or make it."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
