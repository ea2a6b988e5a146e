"""The table of rules and the decorator that fills it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
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

    def touches(self, invalid: Collection[str]) -> bool:
        """Whether a setting that it reads, or something inside one, is invalid."""
        return any(bad == spec.path or bad.startswith(f"{spec.path}.") for spec in self.reads for bad in invalid)


RULES: list[Rule] = []


def rule(*, reads: tuple[FieldSpec, ...]) -> Callable[[Check], Check]:
    """Enter the function below into the table of rules."""

    def enter(check: Check) -> Check:
        RULES.append(Rule(check.__name__.replace("_", "-"), check.__module__.rpartition(".")[2], reads, check))
        return check

    return enter
