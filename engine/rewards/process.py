"""The process that runs reward functions: `python -P -m engine.rewards.process`, JSON lines over its pipes.

A person's function may hang, print or end the process; here it can do none of that to the training. It imports no torch
of its own. One request names the functions; each further one holds a batch and is answered with the values of every
function, or with the problem, the function's place and, where calling it row by row tells, the row.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable
from numbers import Real
from pathlib import Path
from typing import Any

from engine.config.reward_specs import reward_specs
from engine.errors import Redacting, first_line
from engine.rewards.builtin import builtin

MOST_CHARACTERS = 300
"""Of an error's own words in ours; the traceback in the log has them all."""


class Refused(Exception):
    """A problem in words; `row` is its number within the batch where that is known."""

    def __init__(self, what: str, row: int | None = None) -> None:
        super().__init__(what)
        self.what, self.row = what, row


def main() -> int:
    """Serves until its input ends. Whatever functions print goes to the standard error, which is the run's log."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout, sys.stderr = Redacting(sys.stdout), Redacting(sys.stderr)
    functions: list[Callable[..., Any]] = []
    for line in sys.stdin:
        request = json.loads(line)
        number = request.get("function")
        try:
            if "load" in request:
                functions += [load(text) for text in request["load"]]
                answer: dict[str, Any] = {"ok": True}
            else:
                answer = {"values": call(functions[number], request["batch"])}
        except Refused as problem:
            answer = {"problem": problem.what, "row": problem.row}
        answer["mark"] = request["mark"]
        out.write(json.dumps(answer) + "\n")
        out.flush()
    return 0


def load(text: str) -> Callable[..., Any]:
    """The function that a reward's text names. Raises Refused."""
    spec = reward_specs([text])[0]
    if spec.kind != "function":
        try:
            return builtin(spec)
        except ModuleNotFoundError as problem:
            raise Refused(f"needs the package {problem.name}, which is not installed") from None
        except OSError as problem:
            raise Refused(f"{spec.argument} cannot be read: {problem.strerror}") from None
        except ValueError as problem:
            raise Refused(f"cannot be used: {problem}") from None
    path = Path(spec.argument)
    if not path.is_file():
        raise Refused(f"cannot be loaded: there is no file {path}")
    sys.path.append(str(path.parent))
    module_spec = importlib.util.spec_from_file_location(f"reward_{path.stem}", path)
    if module_spec is None or module_spec.loader is None:
        raise Refused(f"{path} is no Python file")
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as problem:  # noqa: BLE001 - the boundary to a person's code
        traceback.print_exc()
        raise Refused(f"cannot be imported with its file: {_describe_error(problem)}") from None
    function = getattr(module, spec.function, None)
    if not callable(function):
        known = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        raise Refused(f"is no function of its file, which has {', '.join(known) or 'none'}")
    return function


def call(function: Callable[..., Any], batch: dict[str, Any]) -> list[float | None]:
    """One number or None for each answer of the batch. Raises Refused."""
    count = len(batch["completions"])
    if missing := _not_given(function, batch):
        raise Refused(f"takes {' and '.join(missing)}, but is given {', '.join(sorted(batch))}")
    try:
        values = _called(function, batch)
    except (Exception, SystemExit) as problem:  # noqa: BLE001 - the boundary to a person's code
        traceback.print_exc()
        raise Refused(f"raised {_describe_error(problem)}", _first_failing(function, batch, count)) from None
    return checked(values, count)


def _not_given(function: Callable[..., Any], batch: dict[str, Any]) -> list[str]:
    """Arguments that the function cannot do without and that no column fills."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
    ]
    return [parameter.name for parameter in needed if parameter.kind in named and parameter.name not in batch]


def checked(values: Any, count: int) -> list[float | None]:
    """The values as plain numbers. Raises Refused for another number of them, or one that is no finite number."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, (list, tuple)):
        raise Refused(f"must return a list of {count} numbers, one an answer; got {type(values).__name__}")
    if len(values) != count:
        raise Refused(f"must return {count} numbers, one an answer; got {len(values)}")
    return [_number(value, place) for place, value in enumerate(values)]


def _number(value: Any, place: int) -> float | None:
    if value is None:
        return None
    if hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, Real):
        raise Refused(f"must return numbers; got {type(value).__name__} {str(value)[:60]}", place)
    number = float(value)
    if number != number or number in (float("inf"), float("-inf")):
        raise Refused(f"must return finite numbers; got {number}", place)
    return number


def _called(function: Callable[..., Any], batch: dict[str, Any]) -> Any:
    parameters = inspect.signature(function).parameters.values()
    named = {parameter.name for parameter in parameters}
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        batch = {name: value for name, value in batch.items() if name in named}
    result = function(**batch)
    return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: Any) -> Any:
    return await result


def _first_failing(function: Callable[..., Any], batch: dict[str, Any], count: int) -> int | None:
    """The first row that the function fails on alone."""
    for place in range(count):
        try:
            _called(function, {name: [values[place]] for name, values in batch.items()})
        except (Exception, SystemExit):  # noqa: BLE001 - the boundary to a person's code
            return place
    return None


def _describe_error(problem: BaseException) -> str:
    text = first_line(problem)
    text = text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]} ..."
    return f"{type(problem).__name__}: {text}" if text else type(problem).__name__


if __name__ == "__main__":
    sys.exit(main())
