"""The rules, one plain function each, and the loop that runs them.

A rule is `(config, facts) -> Iterator[Finding]`; `@rule(reads=...)` names the settings it looks at. It is skipped while
one of them is invalid, and says nothing about facts that are not known. Its name is the function's, with hyphens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from engine.config.facts import Facts
from engine.config.findings import Finding
from engine.config.rules import (  # noqa: F401  each fills the table
    data,
    fit,
    fp8_base,
    kernels,
    later,
    memory,
    method,
    model,
    optimizers,
    rollouts,
    rounding,
    run,
    schedules,
    training,
)
from engine.config.rules.registry import RULES, Rule, rule
from engine.config.tree import RunConfig

__all__ = ["RULES", "Rule", "rule", "run_rules"]


def run_rules(config: RunConfig, facts: Facts, invalid: Collection[str]) -> Iterator[Finding]:
    """The findings of every rule that can be run."""
    settings = {".".join(path.split(".")[:2]) for path in invalid}
    for each in RULES:
        if not each.places.isdisjoint(settings):
            continue
        for finding in each.check(config, facts):
            yield finding if finding.rule else replace(finding, rule=each.name)
