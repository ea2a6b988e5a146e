"""Files and folders that a call names: what may stand there, said in one sentence before anything is done. Exit code 2."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from engine.errors import UsageError, redact, visible

PATH: Any = click.Path(path_type=Path, readable=False)
"""A path as it was typed. Click would refuse one that may not be read with words of its own and without a way out."""


def shown(place: str | os.PathLike[str]) -> str:
    """A path as a message names it: as it was typed, without the home directory."""
    return visible(redact(os.fspath(place)))


def to_read(place: Path, what: str, way: str, *, flag: str = "", folder: bool = False) -> None:
    """Raises UsageError unless a file is there that may be read, or with `folder` a folder. `what` says which, `way` what to do."""
    at = f"{flag}: " if flag else f"{shown(place)}: "
    named = f": {shown(place)}" if flag else ""
    try:
        if place.is_dir():
            if folder:
                os.scandir(place).close()
                return
            raise UsageError(f"{at}must be {what}; got a folder{named}.", way)
        os.close(os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{at}must be {what}; got nothing there{named}.", way) from None
    except OSError as problem:
        raise UsageError(
            f"{at}must be {what} that may be read; got {problem.strerror or problem}{named}.", way
        ) from None


def to_write(
    place: Path, *, flag: str = "", replaces: bool = False, example: str = "my.yaml", way: str = "Choose another name."
) -> Path:
    """The whole path of a new file. Raises UsageError where a folder stands, or a file that is not replaced, and where no file can
    be made."""
    at, folder = (f"{flag} {shown(place)}" if flag else shown(place)), place.parent
    try:
        if place.is_dir():
            raise UsageError(
                f"{at}: must be a file name; got a folder.", f"Name the file in it: {shown(place)}/{example}"
            )
        if not replaces and os.path.lexists(place):
            raise UsageError(f"{at}: must be a new file; this one exists and is kept.", way)
        if not folder.is_dir():
            what = "a file" if folder.exists() else "nothing there"
            raise UsageError(
                f"{at}: must stand in a folder that exists; got {what}: {shown(folder)}.",
                "Make the folder, or name another.",
            )
        allowed = os.access(folder, os.W_OK | os.X_OK)
    except PermissionError:
        allowed = False
    if not allowed:
        raise UsageError(
            f"{at}: must stand in a folder that may be written; got Permission denied: {shown(folder)}.",
            "Name another folder.",
        )
    return place.absolute()


def runs_folder(runs: str | None) -> Path:
    """The folder whose runs are listed. Raises UsageError where one was named that is none."""
    from engine.run import store  # what reads a config alone needs none of it

    root = store.runs_dir(runs)
    if runs is not None and not os.path.isdir(root):
        what = "a file" if os.path.exists(root) else "nothing there"
        raise UsageError(f"--runs: must be a folder that holds runs; got {what}: {shown(root)}. Check the path.")
    return root
