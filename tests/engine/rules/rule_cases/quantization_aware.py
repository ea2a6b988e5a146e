"""Where the rules of `engine.features.quantization_aware` speak."""

from __future__ import annotations

from engine.config.facts import Facts
from engine.hardware import parse_machine
from tests.engine.rules.rule_cases.shared import CPU, FP8, H100, INT8, LORA, NOTHING, Case, model

CASES: dict[str, list[Case]] = {
    "fp8-needs-a-gpu": [(FP8, Facts(machine=CPU), "kernels.quantization_aware", "error")],
    "fp8-needs-a-card-that-has-it": [
        (FP8, Facts(machine=parse_machine(name)), "kernels.quantization_aware", "error")
        for name in ("1xA100-80GB", "1xRTX4090")
    ],
    "quantization-aware-needs-torchao": [
        (changes, Facts(packages=NOTHING), "kernels.quantization_aware", "error") for changes in (FP8, INT8)
    ],
    "fp8-needs-bfloat16": [({**FP8, "model.dtype": "float32"}, Facts(), "model.dtype", "error")],
    "int8-rounding-needs-plain-weights": [
        ({**INT8, **LORA, "model.quantization": "nf4"}, Facts(), "kernels.quantization_aware", "error")
    ],
    "fp8-needs-plain-weights": [
        ({**FP8, **LORA, "model.quantization": held}, Facts(), "kernels.quantization_aware", "error")
        for held in ("int8", "fp8")
    ],
    "weights-stored-in-fp8-are-not-rounded-again": [
        ({**changes, **LORA}, model(stored=stored), "kernels.quantization_aware", "error")
        for changes, stored in ((FP8, "fp8"), (INT8, "fp8"), (INT8, "gptq"))
    ],
    "fp8-wants-compiled-layers": [
        ({**FP8, **changes}, Facts(machine=H100), "kernels.torch_compile", "warning")
        for changes in ({}, {"kernels.torch_compile": False})
    ],
    "fp8-scales-need-fp8": [
        ({**changes, "kernels.fp8_recipe_name": "rowwise"}, Facts(), "kernels.fp8_recipe_name", "error")
        for changes in ({}, INT8)
    ],
}
