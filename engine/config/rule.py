"""What a rule is: the table of all, and the two ways into it, a row of data or a function.

"This setting is refused with that one, because" is a row: `refused(__name__, Refused(...), ...)`. What needs arithmetic, the
model's shape or counted rows is a function below `@rule(reads=...)`. Both stand wherever their subject stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine import figures
from engine.config.facts import Facts
from engine.config.findings import Finding, Fix, Severity, must
from engine.config.tree import FieldSpec, RunConfig
from engine.errors import ModelError

Check = Callable[[RunConfig, Facts], Iterator[Finding]]
Test = Callable[[Any], bool]
"""Whether a value is one that a row speaks of: `one_of`, `other_than`, or `bool` for any that is set."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: its name, the module it stands in and that module's last name, the settings it reads, and the function."""

    name: str
    module: str
    reads: tuple[FieldSpec, ...]
    check: Check
    places: frozenset[str]
    """The paths of those settings and their sections: a whole section may be invalid."""

    @property
    def group(self) -> str:
        """The file or feature it stands in."""
        return self.module.rpartition(".")[2]


RULES: list[Rule] = []


def rule(*, reads: tuple[FieldSpec, ...]) -> Callable[[Check], Check]:
    """Enter the function below into the table of rules."""

    def enter(check: Check) -> Check:
        _enter(check.__name__.replace("_", "-"), check.__module__, reads, check)
        return check

    return enter


@dataclass(frozen=True, slots=True)
class Refused:
    """A row: values of a setting that are refused beside values of others, what it must be, why, and a fix.

    `must` and `because` may name what is in the config (`{config.model.dtype}`) and, with `below`, the card: `{gpu.name}`,
    `{has}`. Facts that are not known refuse nothing.
    """

    name: str
    spec: FieldSpec
    given: Test
    must: str
    because: str
    fix: Fix | None = None
    beside: Mapping[FieldSpec, Test] = field(default_factory=dict)
    gpu: bool | None = None
    """False: only on a machine without a GPU; True: on any but such a one."""
    below: tuple[int, int] | None = None
    """Only where some card has less than this compute capability."""
    without: str = ""
    """Only where this package is not installed."""
    severity: Severity = "error"

    @property
    def of_the_machine(self) -> bool:
        """Whether it is the machine or its packages that refuse it, and not another setting."""
        return self.gpu is False or self.below is not None or bool(self.without)

    def __call__(self, config: RunConfig, facts: Facts) -> Iterator[Finding]:
        """The row as a rule."""
        value, old = self.spec.value(config), None
        if not self.given(value) or not all(fits(spec.value(config)) for spec, fits in self.beside.items()):
            return
        if self.gpu is not None and (facts.machine is None or bool(facts.machine.gpus)) is not self.gpu:
            return
        if self.without and (facts.packages is None or facts.packages.get(self.without, "") is not None):
            return
        if self.below is not None:
            gpus = facts.machine.gpus if facts.machine is not None else ()
            if (old := next((gpu for gpu in gpus if gpu.capability < self.below), None)) is None:
                return
        named = {"config": config, "gpu": old, "has": old and ".".join(map(str, old.capability))}
        text, because = (words.format(**named) for words in (self.must, self.because))
        yield must(self.spec.path, text, value, because, severity=self.severity, fix=self.fix)


def refused(module: str, *rows: Refused) -> None:
    """Enter the rows of a module into the table of rules."""
    for row in rows:
        _enter(row.name, module, (row.spec, *row.beside), row)


def _enter(name: str, module: str, reads: tuple[FieldSpec, ...], check: Check) -> None:
    places = frozenset(place for spec in reads for place in (spec.path, spec.section))
    RULES.append(Rule(name, module, reads, check, places))


def one_of(*values: Any) -> Test:
    """Whether a value is one of these; true is not 1."""
    listed = frozenset((type(value), value) for value in values)

    def among(value: Any) -> bool:
        try:
            return (type(value), value) in listed
        except TypeError:  # a list or a mapping, which no row names
            return False

    return among


def other_than(*values: Any) -> Test:
    """Whether a value is none of these."""
    among = one_of(*values)
    return lambda value: not among(value)


def several(value: object) -> bool:
    """Whether a number is above 1."""
    return isinstance(value, int) and value > 1


def must_divide(spec: FieldSpec, size: int, processes: int, todo: str) -> Iterator[Finding]:
    """That the size of a group divides the number of all processes."""
    if size == 1 or processes % size == 0:
        return
    served = [many for many in range(1, processes + 1) if processes % many == 0]
    known = figures.alternatives(served)
    beside = f"with {processes} process{'' if processes == 1 else 'es'} (run.devices times distributed.nodes)"
    fewer = max(many for many in served if many < size)
    yield must(spec.path, f"{known} {beside}", size, todo, fix=take(spec, fewer))


def take(spec: FieldSpec, value: Any, label: str = "") -> Fix:
    """The fix that sets a setting."""
    return Fix(label or f"take {value}", {spec.path: value})


def leave_out(spec: FieldSpec, label: str = "leave it out") -> Fix:
    """The fix that removes a setting."""
    return Fix(label, unset=(spec.path,))


def own_findings(module: str, config: RunConfig, facts: Facts) -> Iterator[Finding]:
    """What the rules of one module find."""
    return (finding for entered in RULES if entered.module == module for finding in entered.check(config, facts))


def raise_first(findings: Iterable[Finding]) -> None:
    """Raises ModelError with the words of the first error among findings: what a worker says is what a check says."""
    for finding in findings:
        if finding.severity == "error":
            raise ModelError(finding.message.removesuffix(finding.todo).rstrip(), finding.todo)
