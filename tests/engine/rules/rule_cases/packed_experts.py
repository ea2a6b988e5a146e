"""Where the rules of `engine.features.packed_experts` speak."""

from __future__ import annotations

from dataclasses import replace

from engine.config.facts import Facts
from engine.features.packed_experts import EXPERTS_ALONE, UNSERVED
from engine.features.packed_experts import STORED as IN_FILES
from tests.engine.rules.rule_cases.model import MIXTURE
from tests.engine.rules.rule_cases.shared import CPU, LORA, Case, model

STORED = [replace(MIXTURE, model=replace(MIXTURE.model, stored=kind)) for kind in IN_FILES]
NF4 = {**LORA, "model.quantization": "nf4"}
LARGE = {**NF4, "model.name": "Qwen/Qwen3-30B-A3B"}
ON_A_CPU = replace(MIXTURE, machine=CPU)
PATH = "model.quantize_moe_experts"

CASES: dict[str, list[Case]] = {
    "packed-experts-are-computed-here": [
        (NF4, model(model_type=kind, parameters=1000, experts=8), PATH, "error") for kind in UNSERVED
    ],
    "packed-experts-have-adapters-of-small-rank": [
        ({**told, "adapter.target_parameters": ["mlp.experts.down_proj"], "adapter.r": 300}, facts, PATH, "error")
        for told, facts in ((LARGE, MIXTURE), *(({**LARGE, "model.quantization": "none"}, each) for each in STORED))
    ],
    "packed-experts-are-compiled-on-a-card": [
        ({**LARGE, "kernels.torch_compile": True}, ON_A_CPU, "kernels.torch_compile", "error")
    ],
    "formats-of-experts-need-some": [
        (
            {**LORA, "model.quantization": kind},
            model(model_type="qwen3", parameters=1000),
            "model.quantization",
            "error",
        )
        for kind in EXPERTS_ALONE
    ],
    "formats-of-experts-pack-them": [
        ({**LORA, "model.quantization": kind, PATH: False}, Facts(), PATH, "error") for kind in EXPERTS_ALONE
    ],
}
