"""What a kernel or a compiler raises that cannot do its work here. Interrupts and exits are none of them, nor is anything
that the machine has too little of."""

from __future__ import annotations

import contextlib
import subprocess

from engine import errors
from engine.errors import WorkbenchError, visible


def known() -> tuple[type[Exception], ...]:
    """The types to catch."""
    types: tuple[type[Exception], ...] = (
        WorkbenchError, RuntimeError, ValueError, TypeError, AttributeError, AssertionError, ArithmeticError, LookupError,
        ImportError, OSError, subprocess.SubprocessError,
    )  # fmt: skip
    with contextlib.suppress(ImportError):
        from triton.errors import TritonError

        types += (TritonError,)
    return types


def first_line(problem: Exception) -> str:
    """Its message's first line, fit for a terminal; its type's name where it says nothing."""
    return visible(errors.first_line(problem))[:300] or type(problem).__name__
