"""How the workbench is called from where the person stands: the program's name, and a run's.

`make workbench` leaves no command on PATH, and a run may lie in another folder than the usual one; a way back that is
told must work when it is typed. Standard library only.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import as_argument

if TYPE_CHECKING:
    from engine.run.store import RunFolder

NAME = "workbench"


def program() -> str:
    """`workbench` where the shell finds this very one by that name, else its path, else the interpreter with `-m`."""
    started = Path(sys.argv[0])
    if started.name == "__main__.py" and started.parent.name == NAME:
        beside = Path(sys.executable).with_name(NAME)
        if not beside.is_file():
            return f"{file_name(Path(sys.executable))} -m {NAME}"
        started = beside
    if started.name != NAME or not started.is_file():
        return NAME  # called from another program, as a test is
    path = shutil.which(NAME)
    if path is not None and os.path.samefile(path, started):
        return NAME
    return file_name(started)


def run_name(run: RunFolder) -> str:
    """A run as an argument: its id where that is found from here without more, else its folder."""
    from engine.run.store import runs_dir

    return shlex.quote(run.id) if run.path.parent == runs_dir() else file_name(run.path)


def file_name(path: Path) -> str:
    """A file as an argument: the path from here where it lies below, else the absolute one; for a shell."""
    path = Path(os.path.abspath(path))
    try:
        beside = path.relative_to(Path.cwd())
    except (OSError, ValueError):  # elsewhere, or the working directory is gone
        return as_argument(path)
    return shlex.quote(str(beside) if len(beside.parts) > 1 else f"./{beside}")
