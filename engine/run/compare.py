"""What differs between runs: their settings, the ends of their curves, their answers to the same prompts; for every window.

Pure functions over what was read elsewhere; a setting that is empty, or that one run does not know, is `None`
there. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.run.curves import ordered
from engine.run.series import Series
from engine.run.view import RunView

MOST = 4
"""Runs that one chart can tell apart."""
OWN = ("run.name",)  # other in every run, so it says nothing


def settings(mapping: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """A config by dotted path; lists and mappings inside lists stay whole."""
    found: dict[str, Any] = {}
    for key, value in mapping.items():
        path = f"{above}.{key}" if above else str(key)
        found |= (
            settings(value, path)
            if isinstance(value, Mapping) and value
            else {path: None if value in ([], {}) else value}
        )
    return found


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


def extremes(series: Series) -> tuple[float, float] | None:
    """The lowest and the highest value of a curve; nothing for one without a finite value."""
    _, low, high = series.points(width=64)
    lows, highs = [value for value in low if value == value], [value for value in high if value == value]
    return (min(lows), max(highs)) if lows and highs else None


def answers(views: Sequence[RunView]) -> list[tuple[str, list[dict[str, Any] | None]]]:
    """(prompt, the newest sample of each run or nothing) for prompts that at least two of the runs were asked."""
    newest = [{sample["prompt"]: sample for sample in view.samples} for view in views]
    prompts = dict.fromkeys(prompt for each in newest for prompt in each)
    found = [(prompt, [each.get(prompt) for each in newest]) for prompt in prompts]
    return [(prompt, samples) for prompt, samples in found if sum(sample is not None for sample in samples) > 1]
