"""Where the rules of `engine.features.fused_norm_rope` speak."""

from __future__ import annotations

from engine.config.facts import Facts
from tests.engine.rules.rule_cases.shared import CPU, OLD, Case, model

CASES: dict[str, list[Case]] = {
    "fused-attention-needs-a-gpu": [
        ({"kernels.fused_attn_kernel": True}, Facts(machine=CPU), "kernels.fused_attn_kernel", "error")
    ],
    "fused-attention-needs-a-card-of-today": [
        ({"kernels.fused_attn_kernel": True}, Facts(machine=OLD), "kernels.fused_attn_kernel", "error")
    ],
    "fused-attention-knows-the-model": [
        (
            {"kernels.fused_attn_kernel": True},
            model(model_type="phi3", parameters=1000),
            "kernels.fused_attn_kernel",
            "error",
        )
    ],
    "rotation-alone-is-left-to-compiled-layers": [
        (
            {"kernels.fused_attn_kernel": True, "kernels.torch_compile": True},
            model(model_type="llama", parameters=1000),
            "kernels.fused_attn_kernel",
            "hint",
        )
    ],
}
