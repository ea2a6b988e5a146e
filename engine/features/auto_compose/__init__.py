"""`kernels.kernel_auto_compose`: the kernels that are left at `auto` are chosen by timing their combinations."""

from __future__ import annotations

from collections.abc import Iterator

from engine.config.facts import Facts
from engine.config.findings import Finding, Fix, must
from engine.config.rule import Refused, leave_out, refused, rule
from engine.config.tree import RunConfig, fields
from engine.features import compile, fused_experts, fused_lora, liger_kernel

SETTING = fields.kernels.kernel_auto_compose
AFTER = ("padding", "fp32_norms", "quantization_aware")
"""Timed are layers as they compute in training."""
_TIMED = (
    fields.kernels.use_cut_ce,
    fields.kernels.fused_attn_kernel,
    fused_experts.SETTING,
    fused_lora.SETTING,
    liger_kernel.SETTING,
    compile.SETTING,
)

refused(
    __name__,
    Refused(
        "kernel-auto-compose-needs-the-layers-on-the-card",
        SETTING,
        bool,
        "false with memory.layer_offloading",
        "Kernels are timed before the layers stream, while their weights wait on the host: set them by hand.",
        leave_out(SETTING, "remove it"),
        beside={fields.memory.layer_offloading: bool},
    ),
    Refused(
        "full-determinism-takes-no-times",
        SETTING,
        bool,
        "false with run.full_determinism",
        "Which kernels are the fastest differs from run to run, and so would the numbers: set them by hand.",
        leave_out(SETTING, "remove it"),
        beside={fields.run.full_determinism: bool},
    ),
)


@rule(reads=(SETTING, *_TIMED, fields.kernels.torch_compile_options))
def kernel_auto_compose_has_a_choice(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    kernels = config.kernels
    # Kernels that are on have tiles to be timed on a card.
    tiles = True in (kernels.use_cut_ce, kernels.fused_attn_kernel, kernels.fused_experts, kernels.fused_lora)
    in_force = tuple(each.in_force(config, facts) for each in (fused_experts, fused_lora, liger_kernel, compile))
    left = "auto" in (kernels.use_cut_ce, kernels.fused_attn_kernel, *in_force)
    if config.kernels.kernel_auto_compose and not left and not (tiles and (not facts.machine or facts.machine.gpus)):
        todo = f"There is nothing to choose: leave one of {', '.join(spec.name for spec in _TIMED)} at auto."
        fix = Fix("remove it", unset=(SETTING.path,))
        yield must(SETTING.path, "false while every kernel is set by hand", True, todo, fix=fix)
