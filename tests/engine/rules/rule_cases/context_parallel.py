"""Where the rules of `engine.planning.context_parallel` speak."""

from __future__ import annotations

from typing import Any

from engine.config.facts import Facts
from tests.engine.rules.rule_cases.shared import CPU, DPO, GRPO, LORA, Case, model

SPEC = "distributed.context_parallel_size"
TWO = {SPEC: 2, "run.devices": 2}
_BESIDE: dict[str, list[dict[str, Any]]] = {
    "other-methods": [GRPO, DPO, {"method.kind": "distill"}],
    "packing": [{"data.packing": True}],
    "other-attention": [{"model.attention": name} for name in ("eager", "flash_attention_2", "varlen")],
    "other-numbers": [{"model.dtype": "float32"}, {"model.dtype": "float16"}],
    "compiled-layers": [{"kernels.torch_compile": True}],
    "compile-options": [{"kernels.torch_compile": True, "kernels.torch_compile_options": {"shape_padding": True}}],
    "timed-kernels": [{"kernels.kernel_auto_compose": True}],
    "offloaded-activations": [
        {"memory.activation_offloading": "cpu"},
        {**LORA, "memory.activation_offloading": "disk"},
    ],
    "determinism": [{"run.full_determinism": True}],
}
CASES: dict[str, list[Case]] = {
    **{
        f"context-parallel-without-{name}": [({**TWO, **each}, Facts(), SPEC, "error") for each in beside]
        for name, beside in _BESIDE.items()
    },
    "context-parallel-needs-gpus": [(TWO, Facts(machine=CPU), SPEC, "error")],
    "rows-are-divided-over-the-processes": [
        ({SPEC: 2}, Facts(), SPEC, "error"),
        ({SPEC: 3, "run.devices": 4}, Facts(), SPEC, "error"),
        ({SPEC: 4, "run.devices": 3, "distributed.nodes": 2}, Facts(), SPEC, "error"),
    ],
    "rows-are-divided-into-equal-pieces": [
        ({**TWO, "data.max_length": 4098}, Facts(), "data.max_length", "error"),
        ({SPEC: 8, "run.devices": 8, "data.max_length": 12}, Facts(), "data.max_length", "error"),
    ],
    "context-parallel-without-experts-or-images": [
        (TWO, model(experts=8), SPEC, "error"),
        (TWO, model(processor=True), SPEC, "error"),
    ],
}
