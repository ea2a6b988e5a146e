"""What is built in, made once for all tests of a process: the model, in a cache of a test's own, and the rows of dates."""

from __future__ import annotations

import atexit
import dataclasses
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


def share_rows() -> None:
    """24,000 questions are drawn in a tenth of a second for each who asks; from now on once for each seed. Nobody changes them.
    `engine.builtin.dates` itself stays as it is."""
    from engine import builtin

    known = builtin.GENERATED["builtin/dates"]
    drawn = functools.lru_cache(maxsize=4)(known.rows)
    shared = dataclasses.replace(known, rows=lambda *asked: list(drawn(*asked)))
    builtin.GENERATED = {**builtin.GENERATED, "builtin/dates": shared}
