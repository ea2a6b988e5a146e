"""`kernels.fused_lora`: LoRA's projections and gated blocks in closed form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from engine.config.facts import Facts
from engine.config.findings import Finding, must
from engine.config.rule import Refused, leave_out, one_of, other_than, refused, rule
from engine.config.tree import RunConfig, fields
from engine.features import compile
from engine.features.feature import TIMED, Layers, no_mixed_precision

SETTING = fields.kernels.fused_lora
AFTER = ("auto_compose", "liger_kernel", "quantization_aware", "tiled_mlp")
"""Blocks that run in tiles bring their gradients themselves, and attention that rotates in another way keeps doing so."""
CLOSED_FORM_WIDE = 2.0
"""Wide numbers of a token that are kept less (counted on a CPU; an 8B step with checkpointing took 0.5 GiB less on an H200,
where two are 0.38)."""
_UNSET = leave_out(SETTING, "let it be chosen")

refused(
    __name__,
    Refused(
        "fused-lora-needs-an-adapter",
        SETTING,
        one_of(True),
        "false or auto without adapter.kind lora",
        "Without an adapter there are no projections of LoRA to compute.",
        _UNSET,
        beside={fields.adapter.kind: other_than("lora")},
    ),
    Refused(
        "fused-lora-is-plain-lora",
        SETTING,
        one_of(True),
        "false or auto with adapter.use_dora",
        "DoRA scales the whole weight with its adapter, which PEFT computes.",
        _UNSET,
        beside={fields.adapter.kind: one_of("lora"), fields.adapter.use_dora: bool},
    ),
    no_mixed_precision("fused-lora-has-no-mixed-precision", SETTING),
)


def in_force(config: RunConfig, facts: Facts) -> bool | Literal["auto"]:
    """Whether it is computed so; `auto` where that is chosen by timing."""
    asked = config.kernels.fused_lora
    return chosen(config, facts)[0] if asked == "auto" else asked


def chosen(config: RunConfig, facts: Facts) -> tuple[bool | Literal["auto"], str]:
    """What `auto` takes, and why."""
    plain = config.adapter.kind == "lora" and not config.adapter.use_dora and config.model.dtype != "float16"
    asked = config.kernels.torch_compile is True or config.kernels.torch_compile_options
    if config.kernels.kernel_auto_compose and plain and not asked:
        return "auto", TIMED
    return False, "it is taken where it is asked for"


def memory(config: RunConfig, facts: Facts, layers: Layers) -> Layers:
    """Of a gated block gate and up are kept, and nothing that follows from them; their gradients take their place, beside that of
    the product. Experts are no such block."""
    if config.kernels.fused_lora is not True or config.adapter.kind != "lora" or layers.model.experts:
        return layers
    return replace(layers, mlp_kept=layers.mlp_kept - CLOSED_FORM_WIDE, mlp_gradients=1)


@rule(reads=(SETTING, fields.adapter.kind, fields.model.quantization, fields.kernels.quantization_aware))
def fused_lora_reads_the_weights(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if config.kernels.fused_lora is not True or config.adapter.kind != "lora":
        return
    rounded = config.kernels.quantization_aware is True
    if rounded or config.model.quantization == "int8":
        beside = fields.kernels.quantization_aware.path if rounded else f"{fields.model.quantization.path} int8"
        todo = (
            "PEFT computes adapters beside weights in int8; plain and nf4 weights, and those stored in FP8, are served."
        )
        yield must(SETTING.path, f"false or auto with {beside}", True, todo, fix=_UNSET)


@rule(reads=(SETTING, fields.kernels.torch_compile, fields.kernels.torch_compile_options))
def fused_lora_is_not_compiled(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if config.kernels.fused_lora is True and compile.in_force(config, facts) is True:
        todo = "Compiled layers take adapters together themselves, and the compiler chooses what they keep."
        yield must(SETTING.path, "false or auto with kernels.torch_compile", True, todo, fix=_UNSET)
