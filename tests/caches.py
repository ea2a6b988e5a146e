"""Made once for all tests of a process: the model that is built in, in a cache of a test's own, the rows of dates, and what
libraries read or compile anew in each run."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import importlib.metadata
import inspect
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any


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


def share_what_libraries_read() -> None:
    """Versions and files of metadata, which they ask for thirty times a run; the template of a model's card, which PEFT compiles for
    each checkpoint of an adapter: 15 of the 280 ms of a processor that a run of four steps takes."""
    from jinja2 import Environment

    importlib.metadata.version = functools.cache(importlib.metadata.version)
    importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
    compiled, once = Environment.compile, functools.lru_cache(maxsize=16)(Environment.compile)

    def compile(self: Environment, source: Any, *named: Any, **more: Any) -> Any:
        if self.shared and isinstance(source, str) and not named and not more:
            return once(self, source)
        return compiled(self, source, *named, **more)

    Environment.compile = compile  # type: ignore[method-assign]


def unpack_plainly() -> None:
    """Has bitsandbytes unpack numbers of four bits on the CPU, and step its optimizers, by the functions that it would compile:
    for each shape anew, which takes a process half a second, eight times over."""
    if (theirs := sys.modules.get("bitsandbytes.backends.default.ops")) is not None:
        for name, made in list(vars(theirs).items()):
            if inspect.isfunction(made) and "_try_torch_compile" in made.__code__.co_qualname:
                setattr(theirs, name, inspect.unwrap(made))


def seed_plainly() -> None:
    """Has torch keep no note of each seed for devices that are not there, beside the stack of who set it: two thirds of the
    half millisecond that a seed took, and more memory with each."""
    for kind in ("cuda", "xpu"):
        device, random = sys.modules.get(f"torch.{kind}"), sys.modules.get(f"torch.{kind}.random")
        if device is not None and random is not None and not device.is_available():
            vars(random)["_lazy_call"] = _not_at_all


def _not_at_all(*_: Any, **__: Any) -> None:
    pass
