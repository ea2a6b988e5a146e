"""Folders for caches where the home may not be written, as in a container; a home for a process that has none.

A user without an entry in the system's list, `HOME=/` of `docker run --user`, a read-only root. A home that may be read stays
what `~` means: rows, models, the hub's token and what it has fetched. Standard library only, but where it is needed.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

from engine.errors import WorkbenchError, visible

NEED_NONE = {"explain", "recipes", "stop", "checkpoint", "stack"}
"""Commands that keep nothing."""
_PLACES = {"XDG_CACHE_HOME": ".cache", "XDG_STATE_HOME": ".local/state"}


def provide_home(environment: MutableMapping[str, str] = os.environ) -> str:
    """Sets, for this process and what it starts, where caches and logs go if they could not be written below the home: into
    `home-UID` in `WORKBENCH_CACHE`, else into a folder of this user's among the temporary ones. HOME itself is set only where there
    is none. What was done as a sentence; empty where nothing was.

    Raises WorkbenchError where there is no folder either that may be written.
    """
    home = os.path.expanduser("~")
    # Nobody keeps anything in the root, which docker names for want of a home.
    may_read = os.path.isdir(home) and os.access(home, os.R_OK | os.X_OK) and home != "/"
    has_home = may_read or (os.path.isabs(home) and home != "/" and _may_write(Path(home) / ".cache"))
    places = {name: environment.get(name) or f"{home}/{place}" for name, place in _PLACES.items()}
    lacking = [name for name in _PLACES if not _may_write(Path(places[name]))]
    if has_home and not lacking:
        return ""
    import tempfile  # few lack a home

    given = environment.get("WORKBENCH_CACHE")
    folder = Path(given).expanduser().absolute() / "home" if given else Path(tempfile.gettempdir()) / "workbench"
    folder = folder.with_name(f"{folder.name}-{os.getuid()}")
    try:
        from engine.run.spawn import private_folder

        private_folder(folder)
    except OSError as problem:
        place = visible(given) if given else "TMPDIR"
        also = f"{visible(places[lacking[0]])} may not be written" if has_home else "There is no home folder"
        raise WorkbenchError(
            f"{place}: must be a folder that may be written; got {problem.strerror or problem}. {also} either.",
            "Set WORKBENCH_CACHE to one that is kept, and give a read-only container room for temporary files (--tmpfs /tmp).",
        ) from problem
    kept = "" if given else "; set WORKBENCH_CACHE to keep them elsewhere"
    if has_home:
        why = f"{visible(places[lacking[0]])} may not be written"
        kept += _hub(environment, places["XDG_CACHE_HOME"], folder)
        environment.setdefault("TRITON_HOME", str(folder))
        environment.update({name: str(folder / _PLACES[name]) for name in lacking})
    else:
        why = f"{visible(home)} may not be written" if os.path.isabs(home) else "there is no home folder"
        environment["HOME"] = str(folder)
    return f"{why}: caches go to {visible(str(folder))}{kept}."


def _hub(environment: MutableMapping[str, str], caches: str, folder: Path) -> str:
    """What the hub fetches goes into the folder, unless some of it lies among the caches of before: that is read, and so is the
    token. In words what is read there."""
    before = Path(caches) / "huggingface"
    if "HF_HOME" in environment or _may_write(before):
        return ""
    environment["HF_HOME"] = str(folder / ".cache" / "huggingface")
    if os.access(before / "token", os.R_OK):
        environment.setdefault("HF_TOKEN_PATH", str(before / "token"))
    if "HF_HUB_CACHE" in environment or not os.access(before / "hub", os.R_OK | os.X_OK):
        return ""
    environment["HF_HUB_CACHE"] = str(before / "hub")
    return f"; models of the hub are read in {visible(str(before / 'hub'))}, set HF_HUB_CACHE to fetch others elsewhere"


def _may_write(folder: Path) -> bool:
    """Whether this process may write into a folder, or make it."""
    while not os.path.exists(folder) and folder != folder.parent:  # also where it may not be looked at
        folder = folder.parent
    return os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)
