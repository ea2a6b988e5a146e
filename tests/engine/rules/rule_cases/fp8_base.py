"""Where the rules of `engine.features.fp8_base` speak."""

from __future__ import annotations

from engine.config.facts import Facts
from engine.hardware import parse_machine
from tests.engine.rules.rule_cases.shared import CPU, FP8_BASE, TINY_FACTS, Case

CASES: dict[str, list[Case]] = {
    "fp8-base-needs-a-gpu": [(FP8_BASE, Facts(machine=CPU), "model.quantization", "error")],
    "fp8-base-needs-a-card-that-has-it": [
        (FP8_BASE, Facts(machine=parse_machine("1xA100-80GB")), "model.quantization", "error")
    ],
    "fp8-base-needs-bfloat16": [({**FP8_BASE, "model.dtype": "float32"}, Facts(), "model.dtype", "error")],
    "fp8-base-takes-plain-lora": [({**FP8_BASE, "adapter.use_dora": True}, Facts(), "adapter.use_dora", "error")],
    "fp8-base-needs-layers-that-gain": [(FP8_BASE, Facts(model=TINY_FACTS), "model.quantization", "error")],
    "fp8-base-wants-compiled-layers": [
        ({**FP8_BASE, "kernels.torch_compile": False}, Facts(), "kernels.torch_compile", "warning")
    ],
}
