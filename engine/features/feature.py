"""What settings, planning and the worker ask of any one feature: what refuses it, what `auto` of a kernel takes, its bytes."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

from engine.config.facts import Facts, ModelFacts
from engine.config.findings import Finding
from engine.config.rule import RULES, Refused, leave_out, one_of, own_findings, raise_first
from engine.config.tree import FieldSpec, RunConfig, fields


@dataclass(frozen=True, slots=True)
class Layers:
    """What the decoder layers take in one step, in the terms that a feature's `memory(config, facts, layers)` changes;
    `engine.planning.memory_model` adds them up."""

    model: ModelFacts
    tokens: int
    """Of one batch on one device."""
    size: float
    """Bytes of a number that is computed with."""
    checkpointing: bool | str
    """A value of `memory.gradient_checkpointing` other than `auto`."""
    linears: float
    """Bytes of the linear weights, with their scales."""
    mlp_kept: float
    """Numbers that a layer keeps of a token for each of its MLP's width."""
    mlp_gradients: float
    """Gradients of that width that are there at once while it is differentiated."""
    on_the_host: float = 0.0
    """The share of the weights that waits in the host's memory."""
    at_once: float | None = None
    """The share of the tokens whose wide results are there at once, none of which is kept; None where all are."""
    beside: float = 0.0
    """Bytes that all layers keep beside."""
    in_flight: float | None = None
    """Bytes that wait to be moved, in place of all that is kept."""
    kept: float = 1.0
    """The share of it that is kept."""
    fused: bool = False
    """Whether operations between products are computed again where that is cheap, so that products' inputs alone are kept."""
    own_pool: bool = False
    """Whether what they keep lies in memory that nothing else may use, gradients of their own among it."""
    again: int | None = None
    """Numbers that a layer keeps of a token where all else is computed again; None where nothing is."""
    left_out: int = 0
    """The layers, the last ones, of which nothing is computed again though something is of others."""


TIMED = "chosen by timing before the first step"
"""Why a kernel is still `auto` when a run starts."""


def no_mixed_precision(name: str, setting: FieldSpec) -> Refused:
    """The rule that refuses a kernel under autocast."""
    return Refused(
        name,
        setting,
        one_of(True),
        "false or auto with model.dtype float16",
        "float16 trains under autocast, which chooses formats by itself; bfloat16 and float32 are served.",
        leave_out(setting, "let it be chosen"),
        beside={fields.model.dtype: one_of("float16")},
    )


def refusal(feature: ModuleType, config: RunConfig, facts: Facts) -> Finding | None:
    """The first of the feature's own rules that is an error here, or None."""
    findings = own_findings(feature.__name__, config, facts)
    return next((finding for finding in findings if finding.severity == "error"), None)


def refuse(feature: ModuleType, config: RunConfig, facts: Facts, *, machine_alone: bool = False) -> None:
    """Raises ModelError with the words of the feature's own rule, where one of them is an error here; `machine_alone` asks
    only those about the machine, of which a worker knows more than a check did."""
    for each in RULES:
        if each.module == feature.__name__ and not (machine_alone and not getattr(each.check, "of_the_machine", False)):
            raise_first(each.check(config, facts))
