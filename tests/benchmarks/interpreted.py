"""Kernels of a benchmark in Triton's interpreter, in a process of its own: Triton asks for it as it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def run(code: str) -> None:
    """Runs code that imports a benchmark by its name, and fails with what it said."""
    told = {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{FOLDER}{os.pathsep}{FOLDER.parent}"}
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **told}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
