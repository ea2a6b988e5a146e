"""The kernels stand alone: their folder and their tests, copied to an empty place, need torch and triton and little else."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

HERE = Path(__file__).parents[3]
# The last two serve torch itself.
NEEDED = set(["torch", "triton", "platformdirs", "filelock", "pytest", "jinja2", "psutil"])
REFUSING = """
from importlib.machinery import PathFinder

finds = PathFinder.find_spec

def find_spec(cls, name, path=None, target=None):
    return None if name.partition(".")[0] in {names!r} else finds(name, path, target)

PathFinder.find_spec = classmethod(find_spec)
"""
"""A `sitecustomize` under which every process, also one that a test starts, finds none of the `names`."""


def absent() -> set[str]:
    """The modules of the project and of what it depends on, but for what the kernels may import."""
    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    named = [*project["dependencies"], *(each for extra in project["optional-dependencies"].values() for each in extra)]
    names = {each.partition(";")[0].strip().partition(">")[0].partition("<")[0].replace("-", "_") for each in named}
    return (names | {"workbench", "widgets", "ruamel"}) - NEEDED


def test_kernels_import_nothing_else_of_the_engine():
    for file in (HERE / "engine/kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [each.name for each in node.names] if isinstance(node, ast.Import) else []
            assert not [name for name in names if name.startswith("engine") and not name.startswith("engine.kernels")]
            assert not isinstance(node, ast.ImportFrom) or not node.level, file


@pytest.mark.slow
def test_a_copy_of_the_kernels_and_their_tests_passes_without_the_rest_of_the_project(tmp_path):
    for folder in ("engine/kernels", "tests/engine/kernels"):
        shutil.copytree(
            HERE / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", Path(__file__).name)
        )
    for package in ("engine", "tests", "tests/engine"):
        (tmp_path / package / "__init__.py").touch()  # so that nothing is found beside the copy
    (tmp_path / "sitecustomize.py").write_text(REFUSING.format(names=absent()))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: a card\n    slow: over half a minute\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not slow and not gpu", "--import-mode=importlib", "tests"],
        cwd=tmp_path, env=environment, text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    refused = subprocess.run(
        [sys.executable, "-c", "import torch, triton, engine.kernels.linear_logp as ours; print(ours.__file__); import peft"],
        cwd=tmp_path, env=environment, text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert refused.stdout.startswith(str(tmp_path))
    assert "No module named 'peft'" in refused.stderr
