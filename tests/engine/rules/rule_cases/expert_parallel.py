"""Where the rules of `engine.features.expert_parallel` speak."""

from __future__ import annotations

from typing import Any

from engine.config.facts import Facts
from tests.engine.rules.rule_cases.shared import CLUSTER, LORA, Case, model

SPEC = "distributed.expert_parallel_size"
PACKED = "model.quantize_moe_experts"
TWO = {**LORA, SPEC: 2, "run.devices": 2}
MIXTURE = {"model_type": "qwen3_moe", "experts": 8}
_BESIDE: dict[str, list[dict[str, Any]]] = {
    "fsdp2": [{"distributed.strategy": "fsdp2"}],
    "rows-in-parts": [{"distributed.context_parallel_size": 2}],
    "weights-computed-in-fp8": [{"model.quantization": "fp8"}],
    "float16": [{"model.dtype": "float16"}],
    "modules-to-save": [{"adapter.modules_to_save": ["lm_head"]}],
    "timed-kernels": [{"kernels.kernel_auto_compose": True}],
    "quantization-aware": [{"kernels.quantization_aware": True}],
    "tiles": [{"memory.tiled_mlp": True}],
    "offloaded-layers": [{"memory.layer_offloading": True}],
    "offloaded-activations": [{"memory.activation_offloading": "cpu"}],
    "optimizers-of-matrices": [{"optim.optim": name} for name in ("muon", "adamw_8bit")],
}
CASES: dict[str, list[Case]] = {
    **{
        f"expert-parallel-without-{name}": [({**TWO, **each}, Facts(), SPEC, "error") for each in beside]
        for name, beside in _BESIDE.items()
    },
    **{
        f"tiers-without-compiled-pieces-{name}": [
            ({**TWO, **given, "memory.gradient_checkpointing": tier}, Facts(), "memory.gradient_checkpointing", "error")
            for tier in ("selective", "medium")
        ]
        for name, given in (
            ("asked-for", {"kernels.torch_compile": True}),
            ("by-options", {"kernels.torch_compile_options": {"shape_padding": True}}),
        )
    },
    "experts-are-divided-over-the-processes": [
        ({**LORA, SPEC: 2}, Facts(), SPEC, "error"),
        ({**LORA, SPEC: 3, "run.devices": 4}, Facts(), SPEC, "error"),
        ({**LORA, SPEC: 3, "run.devices": 8, "distributed.nodes": 2}, Facts(machine=CLUSTER), SPEC, "error"),
    ],
    "experts-divide": [
        (TWO, model(model_type="qwen3"), SPEC, "error"),
        ({**TWO, SPEC: 3, "run.devices": 3}, model(**MIXTURE), SPEC, "error"),
        ({**TWO, SPEC: 16, "run.devices": 16}, model(**MIXTURE), SPEC, "error"),
        (TWO, model(**MIXTURE, stored="gptq"), SPEC, "error"),
        ({**TWO, "model.quantize_moe_experts": False}, model(**MIXTURE, stored="fp8"), SPEC, "error"),
        (TWO, model(**MIXTURE, processor=True), SPEC, "error"),
    ],
    "experts-are-packed-as-they-are-divided": [
        ({**TWO, "model.quantization": kind, "model.quantize_moe_experts": False}, Facts(), PACKED, "error")
        for kind in ("nf4", "int8")
    ],
}
