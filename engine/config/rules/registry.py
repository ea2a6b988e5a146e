"""The table of rules and the decorator that fills it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from engine.config.facts import Facts
from engine.config.findings import Finding
from engine.config.tree import FieldSpec, RunConfig

Check = Callable[[RunConfig, Facts], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: its name, the group (file) it stands in, the settings it reads, and the function."""

    name: str
    group: str
    reads: tuple[FieldSpec, ...]
    check: Check
    places: frozenset[str]
    """The paths of those settings and their sections: a whole section may be invalid."""


RULES: list[Rule] = []


def rule(*, reads: tuple[FieldSpec, ...]) -> Callable[[Check], Check]:
    """Enter the function below into the table of rules."""

    def enter(check: Check) -> Check:
        name, group = check.__name__.replace("_", "-"), check.__module__.rpartition(".")[2]
        places = frozenset(place for spec in reads for place in (spec.path, spec.section))
        RULES.append(Rule(name, group, reads, check, places))
        return check

    return enter
