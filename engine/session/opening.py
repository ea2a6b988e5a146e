"""A config file that is opened: what it is in a few words, as a draft or as another tool's, its goal and first open question."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config.files import absolute, load, short_path
from engine.config.kinds import MethodSection
from engine.config.method import METHODS
from engine.config.recipes import recipe_mapping
from engine.config.steps import GOALS, Goal
from engine.config.tree import RunConfig
from engine.errors import WorkbenchError
from engine.rules import read
from engine.session.build import step_statuses
from engine.session.draft import Draft

if TYPE_CHECKING:
    from engine.bridge.ledger import Ledger


def about(path: Path) -> tuple[str, str, str]:
    """A file's method by its `kind`, a few words on how it stands, and its model; of one that is no config of ours, words alone."""
    place = "this folder" if path.parent == Path.cwd() else short_path(str(path.parent))
    try:
        document = load(path)
    except WorkbenchError as problem:
        return "", problem.message, ""
    from engine.bridge.detect import TITLES, detect

    tool = detect(document.mapping)
    if tool is not None:
        return "", f"of {TITLES[tool]}, in {place}", ""
    reading = read(document.mapping)
    detail = f"{len(reading.errors)} to mend, in {place}" if reading.errors else f"in {place}"
    return reading.config.method.kind, detail, reading.config.model.name


def configs_in(paths: Iterable[Path]) -> list[RunConfig]:
    """The configs that these files hold, their paths absolute; files that cannot be read are left out."""
    configs = []
    for path in paths:
        try:
            document = load(path)
        except WorkbenchError:
            continue
        configs.append(read(absolute(document.mapping, path.parent)).config)
    return configs


def goal_of(draft: Draft) -> Goal | None:
    """The goal that a config serves: that of its recipe, or else the one whose method is its own or takes such rows."""
    by_recipe = next((goal for goal in GOALS if goal.recipe and goal.recipe == draft.recipe), None)
    if by_recipe is not None:
        return by_recipe
    method = draft.config.method
    if "method" not in draft.mapping and draft.recipe is None and draft.path is None:
        return None
    served = [(goal, _method_of(goal)) for goal in GOALS if goal.recipe and goal.recipe != "demo"]
    exact = next((goal for goal, kind in served if kind == method.kind), None)
    return exact or next((goal for goal, kind in served if _alike(METHODS[kind], type(method))), None)


def _method_of(goal: Goal) -> str:
    assert goal.recipe is not None
    return str(recipe_mapping(goal.recipe).get("method", {}).get("kind", "sft"))


def _alike(one: type[MethodSection], other: type[MethodSection]) -> bool:
    """Whether two methods are ways to the same goal: answers by preference, or by reward."""
    same = {"pairs": "preference", "rated": "preference"}
    return same.get(one.rows, one.rows) == same.get(other.rows, other.rows)


def open_config(path: Path) -> Draft | Ledger:
    """A config file as a draft; one of another tool as what becomes of its keys. Raises ConfigUnreadable, UsageError."""
    from engine.bridge.detect import detect

    document = load(path)
    if detect(document.mapping) is None:
        return Draft.open(document)
    from engine.bridge.tools import take_over

    return take_over(document, out=Path.cwd())


def open_step(draft: Draft) -> str:
    """The step with the first open question: the first with an error, or else the review."""
    return next((status.step for status in step_statuses(draft.findings) if status.errors), "review")
