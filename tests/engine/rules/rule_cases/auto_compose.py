"""Where the rules of `engine.features.auto_compose` speak."""

from __future__ import annotations

from engine.config.facts import Facts
from tests.engine.rules.rule_cases.shared import CPU, LORA, Case

CASES: dict[str, list[Case]] = {
    "kernel-auto-compose-has-a-choice": [
        (
            {
                "kernels.kernel_auto_compose": True,
                "kernels.fused_attn_kernel": False,
                "kernels.fused_experts": False,
                **given,
            },
            facts,
            "kernels.kernel_auto_compose",
            "error",
        )
        for given, facts in (
            ({"kernels.use_cut_ce": False, "kernels.torch_compile": False}, Facts()),
            ({"kernels.use_cut_ce": False, "kernels.torch_compile_options": {"shape_padding": True}}, Facts()),
            ({"kernels.use_cut_ce": True, "kernels.torch_compile": False}, Facts(machine=CPU)),
            (
                {**LORA, "kernels.use_cut_ce": False, "kernels.torch_compile": False, "kernels.fused_lora": False},
                Facts(),
            ),
        )
    ],
    "kernel-auto-compose-needs-the-layers-on-the-card": [
        (
            {"kernels.kernel_auto_compose": True, "memory.layer_offloading": True, **LORA},
            Facts(),
            "kernels.kernel_auto_compose",
            "error",
        )
    ],
    "full-determinism-takes-no-times": [
        (
            {"run.full_determinism": True, "kernels.kernel_auto_compose": True},
            Facts(),
            "kernels.kernel_auto_compose",
            "error",
        )
    ],
}
