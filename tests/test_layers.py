"""Imports run downward only, every module has its layer, and no two modules wait for each other in any way.

Read off the syntax tree, so that imports inside functions and for types count too.
"""

from __future__ import annotations

import ast
import functools
import re
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("engine", "workbench", "widgets")
LINES, METHODS = 60, 20
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

LAYERS = (
    ("engine.worker", "engine.inspector*", "engine.chat*", "engine.evaluate"),
    ("engine.trainers*",),
    ("engine.export*",),
    ("engine.rehearse", "engine.generate"),
    ("engine.features.load", "engine.features.sequence"),
    ("engine.features.*.*", "engine.features.applied", "engine.features.built", "engine.features.failures"),
    ("engine.compat*",),
    ("engine.session*", "engine.job"),
    ("engine.models*", "engine.data*", "engine.rewards*"),
    ("engine.bridge*",),
    ("engine.builtin*",),
    ("engine.client",),
    ("engine.run*",),
    ("engine.rules*",),
    ("engine.planning*",),
    ("engine.features", "engine.features.?*"),
    ("engine.facts*",),
    ("engine.config*",),
    ("engine.model_files",),
    ("engine.hardware", "engine.hub", "engine.caches"),
    ("engine.errors", "engine.figures"),
    ("engine.kernels*",),
    ("engine",),
)  # fmt: skip
"""From the top: a module imports its own layer and those below. Of a feature's folder `__init__` is low, the rest high."""

START = {
    ("workbench.app", "workbench.screens.build"): "the app paints before its largest screen is imported",
    ("workbench.app", "workbench.screens.start"): "a file or a run opens without the screen that lists them",
}
"""Imports that keep a start quick, and close a circle by that."""


def _modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _imports(name: str, path: Path, modules: dict[str, Path]) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in modules else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {each for each in found if each in modules and each != name}


@functools.cache
def _graph() -> dict[str, set[str]]:
    """What each module imports; every process that collects this file would read all sources otherwise."""
    modules = _modules()
    return {name: _imports(name, path, modules) for name, path in modules.items()}


def _layer(name: str) -> int:
    for number, patterns in enumerate(LAYERS):
        for pattern in patterns:
            deep = name.count(".") > pattern.count(".") and pattern == "engine.features.?*"
            if fnmatchcase(name, pattern) and not deep:
                return number
    raise AssertionError(f"{name} has no layer: put it below what may use it")


def test_every_module_imports_downward() -> None:
    upward = [
        f"{name} imports {other}"
        for name, others in _graph().items()
        if name.startswith("engine")
        for other in sorted(others)
        if not other.startswith("engine") or _layer(other) < _layer(name)
    ]
    assert upward == []


def test_the_kernels_import_nothing_of_the_engine() -> None:
    others = {each for name, found in _graph().items() if name.startswith("engine.kernels") for each in found}
    assert [each for each in sorted(others) if not each.startswith("engine.kernels")] == []


def test_no_two_modules_wait_for_each_other() -> None:
    graph = {name: {other for other in others if (name, other) not in START} for name, others in _graph().items()}
    assert _circles(graph) == []
    unneeded = [pair for pair in START if pair[1] not in _graph().get(pair[0], ())]
    assert unneeded == [], "named here, and no such import any more"


def test_functions_and_classes_stay_short() -> None:
    """Longer ones hold more than one piece of work: it has a place of its own."""
    long, large = [], []
    for name, path in _modules().items():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, FUNCTIONS) and (node.end_lineno or 0) - node.lineno >= LINES:
                long.append(f"{name}.{node.name}")
            if isinstance(node, ast.ClassDef) and sum(isinstance(each, FUNCTIONS) for each in node.body) > METHODS:
                large.append(f"{name}.{node.name}")
    assert (long, large) == ([], [])


def test_config_trainer_and_model_have_types_and_few_lines_are_excused() -> None:
    """What is left has its library's reason on the line."""
    text = {name: path.read_text("utf-8") for name, path in _modules().items() if name.startswith("engine")}
    untyped = [name for name, source in text.items() for _ in re.findall(r"\b(?:config|trainer|model): Any", source)]
    ignored = [line for source in text.values() for line in source.splitlines() if "# type: ignore" in line]
    assert len(untyped) < 5, untyped
    assert len(ignored) < 20, ignored
    assert [line for line in ignored if not re.search(r"# type: ignore\[[\w-]+\]  # \w", line)] == []


def _circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Every set of modules that reach each other (Tarjan, doi:10.1137/0201010)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in order:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], order[other])
        if low[name] == order[name]:
            circle = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(circle) > 1:
                found.append(sorted(circle))

    for name in sorted(graph):
        if name not in order:
            visit(name)
    return found
