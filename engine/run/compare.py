"""What differs between runs: their settings, the ends of their curves, their answers to the same prompts; for every window.

Pure functions over what was read elsewhere, and `summary`, all of it as plain data; a setting that is empty, or that one run
does not know, is `None` there. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from engine.config.findings import shown
from engine.errors import UsageError, visible
from engine.run.curves import ordered
from engine.run.series import Series
from engine.run.store import RunFolder
from engine.run.view import RunView

MOST = 8
"""Runs that one chart can tell apart."""
OF_THE_MACHINE = re.compile(r"second|runtime|memory|mfu|gpu|wait")
"""Names of curves that say how fast a run was and what it took: two runs that learned alike differ in them."""
OWN = ("run.name", "run.notify")  # other in every run, so it says nothing; a secret


def fit_to_compare(names: Sequence[str]) -> None:
    """Raises UsageError where these are not two to `MOST` names; asked before any of them is looked for."""
    if not 2 <= len(names) <= MOST or not all(names):
        got = " ".join(visible(name) or "''" for name in names) or "none"
        raise UsageError(f"RUN: must be 2 to {MOST} different runs; got {got}.", "`workbench runs` lists them.")


def unique_names(folders: Sequence[RunFolder]) -> list[str]:
    """What to call each: its id, or its whole path where another has the same id. Raises UsageError for one that is there twice."""
    ids, paths = [folder.id for folder in folders], [str(folder.path.resolve()) for folder in folders]
    for path in paths:
        if paths.count(path) > 1:
            raise UsageError(
                f"RUN: must be 2 to {MOST} different runs; got {visible(path)} twice.", "Name another one."
            )
    return [id if ids.count(id) == 1 else path for id, path in zip(ids, paths, strict=True)]


def settings(mapping: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """A config by dotted path; lists and mappings inside lists stay whole."""
    values: dict[str, Any] = {}
    for key, value in mapping.items():
        path = f"{above}.{key}" if above else str(key)
        values |= (
            settings(value, path)
            if isinstance(value, Mapping) and value
            else {path: None if value in ([], {}) else value}
        )
    return values


def differences(configs: Sequence[Mapping[str, Any]]) -> list[tuple[str, tuple[Any, ...]]]:
    """(path, a value for each config) of every setting that is not the same in all, in the order of the first.

    Those that all configs have stand before those of some alone, as the settings of one method are.
    """
    flat = [settings(config) for config in configs]
    paths = sorted(
        dict.fromkeys(path for each in flat for path in each), key=lambda path: any(path not in each for each in flat)
    )
    rows = [(path, tuple(each.get(path) for each in flat)) for path in paths if path not in OWN]
    return [(path, values) for path, values in rows if any(value != values[0] for value in values[1:])]


def shared_curves(views: Sequence[RunView]) -> list[str]:
    """Curves to lay over each other: those that at least two runs have, as the method of the first with curves orders them."""
    counted = [name for view in views for name in view.series]
    least = min(2, len(views))
    names = [name for name in dict.fromkeys(counted) if counted.count(name) >= least]
    method = next((view.method for view in views if view.series), "")
    return list(ordered(method, names))


def identical(names: Sequence[str], views: Sequence[RunView]) -> list[list[str]]:
    """Names of runs whose curves are the same at every step, but for those of the machine; each group of them once."""
    learned = [
        {name: curve for name, curve in view.series.items() if len(curve) and not OF_THE_MACHINE.search(name)}
        for view in views
    ]
    groups: list[tuple[dict[str, Series], list[str]]] = []
    for name, curves in zip(names, learned, strict=True):
        found = next((called for known, called in groups if known == curves), None) if curves else None
        if found is None:
            groups.append((curves, [name]))
        else:
            found.append(name)
    return [called for _, called in groups if len(called) > 1]


def describe_identical(groups: Sequence[Sequence[str]]) -> list[str]:
    """A sentence for each group of runs that learned alike; names are cut where they are many."""
    return [
        f"{_listed([visible(name) for name in each])} are identical: each of their curves has the same values at every step."
        for each in groups
    ]


def _listed(names: Sequence[str]) -> str:
    if len(names) > 3:
        return f"{names[0]}, {names[1]} and {len(names) - 2} others"
    return f"{', '.join(names[:-1])} and {names[-1]}"


def extremes(series: Series) -> tuple[float, float] | None:
    """The lowest and the highest value of a curve; nothing for one without a finite value."""
    _, low, high = series.points(width=64)
    lows, highs = [value for value in low if value == value], [value for value in high if value == value]
    return (min(lows), max(highs)) if lows and highs else None


def answers(views: Sequence[RunView]) -> list[tuple[str, list[dict[str, Any] | None]]]:
    """(prompt, the newest sample of each run or nothing) for prompts that at least two of the runs were asked."""
    newest = [{sample["prompt"]: sample for sample in view.samples} for view in views]
    prompts = dict.fromkeys(prompt for by_prompt in newest for prompt in by_prompt)
    rows = [(prompt, [by_prompt.get(prompt) for by_prompt in newest]) for prompt in prompts]
    return [(prompt, samples) for prompt, samples in rows if sum(sample is not None for sample in samples) > 1]


def format_value(value: Any) -> str:
    """A setting's value as a person would write it; sources by their files."""
    if isinstance(value, list) and value and all(isinstance(entry, Mapping) and entry.get("path") for entry in value):
        return ", ".join(visible(str(entry["path"])) for entry in value)
    return "-" if value is None else shown(value)


def summary(names: Sequence[str], views: Sequence[RunView], configs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All of it as plain data: `runs`, `curves` by name, `settings`, `answers`, each with a value or `None` for every run; and
    `identical`, the ids of runs that learned alike."""
    runs = [
        {"id": name, "state": v.state, "method": v.method, "step": v.step, "max_steps": v.max_steps}
        for name, v in zip(names, views, strict=True)
    ]
    asked = [
        {"prompt": prompt, "answers": [sample and {"step": sample["step"], "text": sample["completion"]} for sample in samples]}
        for prompt, samples in answers(views)
    ]  # fmt: skip
    return {
        "runs": runs,
        "curves": {name: [_ends(view, name) for view in views] for name in shared_curves(views)},
        "settings": [{"path": path, "values": list(values)} for path, values in differences(configs)],
        "answers": asked,
        "identical": identical(names, views),
    }


def _ends(view: RunView, name: str) -> dict[str, float | None] | None:
    end = extremes(view.series[name]) if name in view.series else None
    return {"last": view.latest.get(name), "lowest": end[0], "highest": end[1]} if end else None
