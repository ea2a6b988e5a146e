"""A cache of a test's own in which the built-in model is already there: it is made once for all tests of a process."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path


def own_cache(folder: Path) -> str:
    """The folder, for WORKBENCH_CACHE; only its built-in models are shared with other tests."""
    folder.mkdir(parents=True, exist_ok=True)
    shared = folder / "builtin"
    if not shared.is_symlink():
        shared.symlink_to(_models(os.getpid()))
    return str(folder)


@functools.cache
def _models(owner: int) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="workbench-tests-models-"))
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)
    return folder
