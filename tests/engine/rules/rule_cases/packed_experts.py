"""Where the rules of `engine.features.packed_experts` speak."""

from __future__ import annotations

from engine.features.fused_experts import UNSERVED
from tests.engine.rules.rule_cases.model import MIXTURE
from tests.engine.rules.rule_cases.shared import LORA, Case, model

NF4 = {**LORA, "model.quantization": "nf4"}
LARGE = {**NF4, "model.name": "Qwen/Qwen3-30B-A3B"}
PATH = "model.quantize_moe_experts"

CASES: dict[str, list[Case]] = {
    "packed-experts-are-computed-here": [
        (NF4, model(model_type=kind, parameters=1000, experts=8), PATH, "error") for kind in UNSERVED
    ],
    "packed-experts-have-adapters-of-small-rank": [
        ({**LARGE, "adapter.target_parameters": ["mlp.experts.down_proj"], "adapter.r": 300}, MIXTURE, PATH, "error")
    ],
    "packed-experts-do-not-stream": [
        ({**LARGE, "memory.layer_offloading": True}, MIXTURE, "memory.layer_offloading", "error")
    ],
    "packed-experts-are-not-compiled": [
        ({**LARGE, "kernels.torch_compile": True}, MIXTURE, "kernels.torch_compile", "error")
    ],
}
