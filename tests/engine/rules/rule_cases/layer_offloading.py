"""Where the rules of `engine.features.layer_offloading` speak."""

from __future__ import annotations

from dataclasses import replace

from engine.config.facts import Facts
from engine.hardware import parse_machine
from tests.engine.rules.rule_cases.shared import CPU, GRPO, H100, INT8, LORA, STREAMED, Case, model

CASES: dict[str, list[Case]] = {
    "layer-offloading-needs-a-gpu": [
        ({**LORA, "memory.layer_offloading": True}, Facts(machine=CPU), "memory.layer_offloading", "error")
    ],
    "layer-offloading-needs-frozen-weights": [
        ({"memory.layer_offloading": True}, Facts(machine=H100), "memory.layer_offloading", "error")
    ],
    "layer-offloading-cannot-move-int8": [
        ({**STREAMED, "model.quantization": "int8"}, Facts(machine=H100), "model.quantization", "error")
    ],
    "layer-offloading-needs-one-device": [
        ({**STREAMED, "run.devices": 2}, Facts(machine=parse_machine("2xH100-80GB")), "run.devices", "error")
    ],
    "layer-offloading-leaves-nothing-to-convert": [
        (
            {**STREAMED, "model.dtype": "float32", "optim.bf16_full_eval": True, "data.eval": [{"path": "e.jsonl"}]},
            Facts(machine=H100),
            "optim.bf16_full_eval",
            "error",
        )
    ],
    "layer-offloading-and-rounding-do-not-meet": [
        ({**STREAMED, **INT8}, Facts(machine=H100), "kernels.quantization_aware", "error")
    ],
    "layer-offloading-leaves-packed-integers-on-the-card": [
        (STREAMED, replace(model(stored=stored), machine=H100), "memory.layer_offloading", "error")
        for stored in ("gptq", "compressed-tensors")
    ],
    "layer-offloading-has-no-fixed-addresses": [
        (
            {**STREAMED, "kernels.torch_compile_options": {"triton.cudagraphs": True}},
            Facts(machine=H100),
            "kernels.torch_compile_options.triton.cudagraphs",
            "error",
        )
    ],
    "layers-come-in-for-every-token-sampled": [
        ({**GRPO, **STREAMED}, Facts(machine=H100), "memory.layer_offloading", "warning")
    ],
}
