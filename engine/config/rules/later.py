"""Settings that the schema knows and this version does not do yet: each refused by a rule of its own, never ignored.

`auto` of such a setting is off, and the list of requested -> effective says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine.config.facts import Facts
from engine.config.findings import Finding, Fix, must
from engine.config.rules.registry import rule
from engine.config.tree import FieldSpec, RunConfig, fields


def _refuse(spec: FieldSpec, config: RunConfig, rule_text: str, todo: str, change: Any = None) -> Iterator[Finding]:
    """An error when the setting has one of the values that come later."""
    value = spec.value(config)
    if any(value == later and isinstance(value, bool) == isinstance(later, bool) for later in spec.later):
        fix = (
            Fix("leave it out", unset=(spec.path,))
            if change is None
            else Fix(f"take {str(change).lower()}", {spec.path: change})
        )
        yield must(spec.path, f"{rule_text} in this version", value, todo, fix=fix)


@rule(reads=(fields.data.streaming,))
def streaming_comes_later(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    todo = "It comes in a later version; prepared rows are memory-mapped, so large data need disk, not memory."
    yield from _refuse(fields.data.streaming, config, "false", todo)


@rule(reads=(fields.run.backend,))
def mlx_is_not_a_backend_here(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if config.run.backend == "mlx":
        todo = "MLX trains on Apple chips with a library of its own; here torch does, also on a Mac's CPU."
        yield from _refuse(fields.run.backend, config, "torch", todo)


@rule(reads=(fields.run.backend,))
def unsloth_is_not_a_backend_here(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if config.run.backend == "unsloth":
        todo = "Unsloth rewrites the libraries that this workbench trains with, so the two cannot run in one process."
        yield from _refuse(fields.run.backend, config, "torch", todo)
