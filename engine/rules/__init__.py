"""The rules, rows of data or plain functions (`engine.config.rule`), and the loop that runs them.

A rule is `(config, facts) -> Iterator[Finding]` and names the settings it looks at. It is skipped while one of them is
invalid, and says nothing about facts that are not known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

from engine.config import reading
from engine.config.facts import Facts
from engine.config.findings import Finding
from engine.config.reading import Reading
from engine.config.rule import RULES as _ENTERED
from engine.config.rule import Rule, rule
from engine.config.tree import RunConfig
from engine.features.table import FEATURES, Feature
from engine.planning import context_parallel, sharding
from engine.rules import (
    adapter_folder,
    async_rollouts,
    data,
    fit,
    memory,
    method,
    model,
    optimizers,
    rollouts,
    run,
    schedules,
    sources,
    streaming,
    training,
)

__all__ = ["RULES", "Rule", "read", "rule", "run_rules"]


_MODULES: tuple[Feature | ModuleType, ...] = (
    adapter_folder,
    async_rollouts,
    context_parallel,
    data,
    fit,
    *FEATURES,
    memory,
    method,
    model,
    optimizers,
    rollouts,
    run,
    schedules,
    sharding,
    sources,
    streaming,
    training,
)
"""Where rules stand: what is about one feature in its own folder, all else here."""
_PLACES = {module.__name__: place for place, module in enumerate(_MODULES)}
RULES: tuple[Rule, ...] = tuple(sorted(_ENTERED, key=lambda each: _PLACES[each.module]))
"""Every rule, in the order in which they speak, whichever module was imported first."""


def read(mapping: Mapping[str, Any] | None, facts: Facts | None = None) -> Reading:
    """The config that `mapping` describes, and everything wrong with it at once, by every rule."""
    return reading.read(mapping, facts, run_rules)


def run_rules(config: RunConfig, facts: Facts, invalid: Collection[str]) -> Iterator[Finding]:
    """The findings of every rule that can be run."""
    settings = {".".join(path.split(".")[:2]) for path in invalid}
    for entered in RULES:
        if not entered.places.isdisjoint(settings):
            continue
        for finding in entered.check(config, facts):
            yield finding if finding.rule else replace(finding, rule=entered.name)
