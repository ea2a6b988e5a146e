"""Where the rules of `engine.features.fused_lora` speak."""

from __future__ import annotations

from engine.config.facts import Facts
from tests.engine.rules.rule_cases.shared import H100, Case

CASES: dict[str, list[Case]] = {
    "fused-lora-needs-an-adapter": [
        ({"kernels.fused_lora": True, "adapter.kind": "none"}, Facts(), "kernels.fused_lora", "error")
    ],
    "fused-lora-is-plain-lora": [
        (
            {"kernels.fused_lora": True, "adapter.kind": "lora", "adapter.use_dora": True},
            Facts(),
            "kernels.fused_lora",
            "error",
        )
    ],
    "fused-lora-has-no-mixed-precision": [
        (
            {"kernels.fused_lora": True, "adapter.kind": "lora", "model.dtype": "float16"},
            Facts(machine=H100),
            "kernels.fused_lora",
            "error",
        )
    ],
    "fused-lora-reads-the-weights": [
        (
            {"kernels.fused_lora": True, "adapter.kind": "lora", **int8},
            Facts(machine=H100),
            "kernels.fused_lora",
            "error",
        )
        for int8 in ({"kernels.quantization_aware": True}, {"model.quantization": "int8"})
    ],
    "fused-lora-is-not-compiled": [
        ({"kernels.fused_lora": True, "adapter.kind": "lora", **compiled}, Facts(), "kernels.fused_lora", "error")
        for compiled in (
            {"kernels.torch_compile": True},
            {"kernels.torch_compile_options": {"shape_padding": True}},
        )
    ],
}
