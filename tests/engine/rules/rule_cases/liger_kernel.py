"""Where the rules of `engine.features.liger_kernel` speak."""

from __future__ import annotations

from engine.config.facts import Facts
from tests.engine.rules.rule_cases.shared import CPU, H100, LORA, NOTHING, OLD, Case

ON = {"kernels.use_liger_kernel": True}
OFF = {"rms_norm": False, "rope": False, "swiglu": False, "geglu": False}
CASES: dict[str, list[Case]] = {
    "liger-kernel-needs-a-gpu": [(ON, Facts(machine=CPU), "kernels.use_liger_kernel", "error")],
    "liger-kernel-needs-a-card-of-today": [(ON, Facts(machine=OLD), "kernels.use_liger_kernel", "error")],
    "liger-kernel-needs-its-package": [
        (ON, Facts(machine=H100, packages={**NOTHING, "liger-kernel": None}), "kernels.use_liger_kernel", "error")
    ],
    "liger-kernel-needs-the-layers-on-the-card": [
        ({**LORA, **ON, "memory.layer_offloading": True}, Facts(), "kernels.use_liger_kernel", "error")
    ],
    "liger-kernel-has-no-mixed-precision": [
        ({**ON, "model.dtype": "float16"}, Facts(), "kernels.use_liger_kernel", "error")
    ],
    "liger-kernel-is-not-compiled": [
        ({**ON, **given}, Facts(), "kernels.use_liger_kernel", "error")
        for given in ({"kernels.torch_compile": True}, {"kernels.torch_compile_options": {"shape_padding": True}})
    ],
    "compiled-layers-are-faster-than-liger-kernel": [
        (
            {**ON, **LORA, "optim.max_steps": 1000, "data.packing": True},
            Facts(machine=H100, packages={**NOTHING, "liger-kernel": "0.8.5"}),
            "kernels.use_liger_kernel",
            "hint",
        )
    ],
    "liger-kernel-config-names-parts": [
        ({"kernels.liger_kernel_config": {key: value}}, Facts(), f"kernels.liger_kernel_config.{key}", "error")
        for key, value in (
            ("rmsnorm", True),
            ("rope", "on"),
            ("rope", "no"),
            ("rope", 5),
            ("fused_linear_cross_entropy", True),
        )
    ],
    "liger-kernel-has-a-part": [
        ({**ON, "kernels.liger_kernel_config": OFF}, Facts(), "kernels.use_liger_kernel", "error"),
        (
            {**ON, **LORA, "kernels.fused_attn_kernel": True, "kernels.fused_lora": True, "memory.fp32_norms": True},
            Facts(),
            "kernels.use_liger_kernel",
            "error",
        ),
        (
            {**ON, "kernels.liger_kernel_config": {"rope": True}, "memory.gradient_checkpointing": "medium"},
            Facts(),
            "kernels.liger_kernel_config.rope",
            "error",
        ),
    ],
}
