"""Where the rules of `engine.features.fused_experts` speak."""

from __future__ import annotations

from engine.config.facts import Facts
from engine.features.fused_experts import UNSERVED
from tests.engine.rules.rule_cases.shared import CPU, LORA, OLD, Case, model

ON = {"kernels.fused_experts": True}
PATH = "kernels.fused_experts"

CASES: dict[str, list[Case]] = {
    "fused-experts-need-a-card": [(ON, Facts(machine=machine), PATH, "error") for machine in (CPU, OLD)],
    "fused-experts-know-the-model": [
        (ON, model(model_type="llama", parameters=1000), PATH, "error"),
        *((ON, model(model_type=kind, parameters=1000, experts=8), PATH, "error") for kind in UNSERVED),
    ],
    "fused-experts-have-adapters-of-small-rank": [
        (
            {**ON, **LORA, "adapter.target_parameters": ["experts.down_proj"], "adapter.r": 300},
            Facts(),
            PATH,
            "error",
        )
    ],
    "fused-experts-have-no-mixed-precision": [({**ON, "model.dtype": "float16"}, Facts(), PATH, "error")],
    "fused-experts-read-plain-weights": [
        ({**ON, **LORA, "model.quantization": "fp8"}, Facts(), PATH, "error"),
        (ON, model(model_type="qwen3_moe", parameters=1000, experts=8, stored="fp8"), PATH, "error"),
    ],
}
