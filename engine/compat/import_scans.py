"""What libraries look for in thousands of files each time they are imported, kept from one start to the next.

transformers reads all of its own 3,200 source files for the names in them, TRL the lists of files of every installed
package, and torch the sources of whoever registers an operation, for a line of code that nobody asks for. Together that is
0.7 s of a worker's 4.5 on a CPU, and more where files lie on a network. What the first two find is kept in the user's
cache, known by what would change it: the release and the installation of transformers, the folders of packages and the
time of their last change. A copy that is worked on (editable, or between releases) is read each time. Inside of `kept`
alone, and put back afterwards; what is not readable is found anew.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from engine.caches import user_cache
from engine.errors import WorkbenchError
from engine.run.spawn import private_folder

WHERE = "transformers.utils.import_utils"
MODELS = "models"
SETTLED = 120 * 10**9
"""Nanoseconds that folders of packages must have been as they are before it is kept what is in them."""
LARGEST = 16 * 1024**2
"""Bytes of a file that is read; transformers' names are a twentieth of it."""
Names = dict[frozenset[str], dict[str, set[str]]]
"""By the packages that they need, the modules of all models and the names in each."""


def place() -> Path:
    """The folder in which it is kept."""
    return user_cache() / "imports"


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Inside, imports of libraries find what they look for in the user's cache."""
    with contextlib.ExitStack() as stack:
        if "transformers" not in sys.modules and (key := _release("transformers")) is not None:
            finder = _Finder(key)
            sys.meta_path.insert(0, finder)
            stack.callback(lambda: sys.meta_path.remove(finder) if finder in sys.meta_path else None)
        stack.enter_context(_replaced(importlib.metadata, "packages_distributions", _distributions))
        stack.enter_context(_replaced(inspect, "getframeinfo", _frame_info(inspect.getframeinfo)))
        yield


@contextlib.contextmanager
def _replaced(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _frame_info(plain: Callable[..., inspect.Traceback]) -> Callable[..., inspect.Traceback]:
    """The same without the source's lines where torch asks for the frame alone; all others, `inspect.stack` among them, have
    what they ask for."""

    def getframeinfo(frame: Any, *context: Any, **named: Any) -> inspect.Traceback:
        asking = str(sys._getframe(1).f_globals.get("__name__", ""))
        if not context and not named and asking.partition(".")[0] == "torch":
            return plain(frame, context=0)
        return plain(frame, *context, **named)

    return getframeinfo


# -- the names in transformers' models ---------------------------------------------------------------------------------
class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module of transformers as Python would, and has its scan of the models kept."""

    def __init__(self, key: str) -> None:
        self._key = key

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name != WHERE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._key)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: Any, key: str) -> None:
        self._inner, self._key = inner, key

    def create_module(self, spec: Any) -> ModuleType | None:
        made: ModuleType | None = self._inner.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        spec.loader = module.__loader__ = self._inner
        self._inner.exec_module(module)
        scan = getattr(module, "define_import_structure", None)
        if scan is not None:
            module.__dict__["define_import_structure"] = _scanned_once(scan, self._key)


def _scanned_once(scan: Callable[..., Names], key: str) -> Callable[..., Names]:
    @functools.cache
    def of_models(folder: Path) -> Names:
        # The folder's own time, for a model that somebody puts beside those of the release.
        name = f"models {key} {folder} {_changed(folder)}"
        found = _names(_read(name))
        if found is None:
            found = scan(folder, prefix=MODELS)
            _write(
                name,
                [
                    [sorted(needed), {file: sorted(each) for file, each in files.items()}]
                    for needed, files in found.items()
                ],
            )
        return found

    @functools.cache
    @functools.wraps(scan)
    def define_import_structure(module_path: Any, prefix: str | None = None, **more: Any) -> Names:
        folder = _models_at(module_path, prefix)
        if folder is None or more:
            return scan(module_path, prefix=prefix, **more)
        # transformers asks twice, for itself and for `transformers.models`, and adds names of its own to the first answer.
        cut = "" if prefix else f"{MODELS}."
        return {
            needed: {file.removeprefix(cut): set(names) for file, names in files.items()}
            for needed, files in of_models(folder).items()
        }

    return define_import_structure


def _models_at(module_path: Any, prefix: str | None) -> Path | None:
    """The folder of all models where its names are asked for, None where it is another's."""
    path = Path(module_path)
    if prefix == MODELS:
        return path
    own = prefix is None and path.name == "__init__.py" and path.parts[-3:-1] == ("transformers", MODELS)
    return path.parent if own else None


def _names(value: Any) -> Names | None:
    """What was written, or None where it is something else."""
    try:
        return {
            frozenset(map(_word, needed)): {_word(file): set(map(_word, names)) for file, names in files.items()}
            for needed, files in value
        } or None
    except (TypeError, ValueError, AttributeError):
        return None


def _release(package: str) -> str | None:
    """What tells one installation of a release from any other; None for a copy that is worked on."""
    try:
        found = importlib.metadata.distribution(package)
        folder = Path(str(found.locate_file("")))
        direct = found.read_text("direct_url.json") or "{}"
        record = next(folder.glob(f"{package}-{found.version}.dist-info"))
        changed = record.stat().st_mtime_ns
    except (importlib.metadata.PackageNotFoundError, OSError, StopIteration):
        return None
    if "editable" in direct or "dev" in found.version:
        return None
    return f"{found.version} {changed} {sys.version_info[:2]}"


# -- which packages are installed --------------------------------------------------------------------------------------
def _distributions() -> Mapping[str, list[str]]:
    """As `importlib.metadata.packages_distributions`: by the name that is imported, who brought it."""
    folders = [(each, _changed(each)) for each in sys.path]
    name = f"distributions {sys.version_info[:2]} {folders}"
    found = _read(name)
    if isinstance(found, dict) and found and all(isinstance(each, list) for each in found.values()):
        with contextlib.suppress(TypeError):
            return {_word(package): list(map(_word, each)) for package, each in found.items()}
    fresh = _plain_distributions()
    # What is being installed has a folder before it has all of its files, and these no longer change the time of the first.
    if all(changed < time.time_ns() - SETTLED for _, changed in folders):
        _write(name, fresh)
    return fresh


_plain_distributions = importlib.metadata.packages_distributions


def _changed(folder: str | Path) -> int:
    try:
        return os.stat(folder or ".").st_mtime_ns
    except OSError:
        return 0


# -- the cache ---------------------------------------------------------------------------------------------------------
def _word(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _file(name: str) -> Path:
    return place() / f"{name.partition(' ')[0]}-{hashlib.sha256(name.encode()).hexdigest()[:32]}.json"


def _read(name: str) -> Any:
    try:
        private_folder(place())
        file = _file(name)
        if file.stat().st_size > LARGEST:
            return None
        held = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError, WorkbenchError):
        return None
    return held.get("found") if isinstance(held, dict) and held.get("of") == name else None


def _write(name: str, found: Any) -> None:
    """Keeps it, the newest few of its kind beside it; a cache that cannot be written costs the next start what this one took."""
    with contextlib.suppress(OSError, WorkbenchError):
        folder, file = private_folder(place()), _file(name)
        beside = folder / f".{file.name}.{os.getpid()}"
        beside.write_text(json.dumps({"of": name, "found": found}), "utf-8")
        beside.replace(file)
        alike = folder.glob(f"{file.name.partition('-')[0]}-*.json")
        for old in sorted(alike, key=lambda each: each.stat().st_mtime_ns)[:-8]:
            old.unlink(missing_ok=True)
