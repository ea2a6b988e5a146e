"""What the text of a reward's Python file tells without running it: whether Python reads it, and whether it has the function."""

from __future__ import annotations

import warnings
from pathlib import Path

from engine.errors import nearest, visible

LARGEST = 1 << 20
"""Bytes of a file that are looked at; a larger one is left to the run."""
_UNSEEN = {"exec", "eval", "globals", "vars", "setattr", "__getattr__"}
"""Names by which a file may get functions that its text does not show."""
SHOWN = 8


def function_flaw(file: Path, function: str) -> str:
    """Why a run could not take `function` from `file`, as a sentence with the way out; empty where only running it would tell."""
    import ast  # only a config with a reward of one's own needs it

    try:
        text = file.read_bytes()
        if len(text) > LARGEST:
            return ""
        with warnings.catch_warnings():  # of odd escapes, which are the file's own affair
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except OSError:
        return ""  # the run says why
    except SyntaxError as problem:
        where = f", line {problem.lineno}" if problem.lineno else ""
        return f"{visible(file.name)}{where}: Python cannot read it: {visible(problem.msg)}. Mend the file."
    except (ValueError, RecursionError, MemoryError):
        return f"{visible(file.name)}: Python cannot read it. Mend the file."
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    bound = set(defined)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            bound.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.alias):
            bound.add(node.asname or node.name.partition(".")[0])
    if function in bound or "*" in bound or bound & _UNSEEN:
        return ""
    close = nearest(function, defined, cutoff=0.7)
    known = ", ".join(visible(name) for name in defined[:SHOWN]) + (", …" if len(defined) > SHOWN else "")
    way = f"Did you mean {visible(close)}?" if close else f"It has {known or 'no function'}."
    return f"{visible(file.name)} has no function {visible(function)}. {way}"
