"""Where the rules of `engine.config.rules.memory` speak."""

from __future__ import annotations

from dataclasses import replace

from engine.config.facts import Facts
from engine.hardware import GiB, parse_machine
from tests.engine.config.rule_cases.shared import CPU, GRPO, H100, INT8, LARGE, LORA, STREAMED, Case, model

CASES: dict[str, list[Case]] = {
    "offloading-to-the-host-needs-a-gpu": [
        ({"memory.activation_offloading": "cpu"}, Facts(machine=CPU), "memory.activation_offloading", "error")
    ],
    "offloading-moves-what-autograd-saves": [
        (
            {"memory.activation_offloading": "cpu", "memory.gradient_checkpointing": tier},
            Facts(machine=H100),
            "memory.gradient_checkpointing",
            "error",
        )
        for tier in ("selective", "medium")
    ],
    "offloading-to-disk-takes-time": [
        (
            {"model.name": "Qwen/Qwen3-8B", **LORA, "memory.activation_offloading": "disk"},
            Facts(machine=H100, model=LARGE),
            "memory.activation_offloading",
            "warning",
        )
    ],
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
    "offloading-both-needs-checkpoints": [
        (
            {**STREAMED, "memory.activation_offloading": "cpu", "memory.gradient_checkpointing": False},
            Facts(machine=H100),
            "memory.gradient_checkpointing",
            "error",
        )
    ],
    "layer-offloading-has-no-fixed-addresses": [
        (
            {**STREAMED, "kernels.torch_compile_options": {"triton.cudagraphs": True}},
            Facts(machine=H100),
            "kernels.torch_compile_options.triton.cudagraphs",
            "error",
        )
    ],
    "layers-fit-into-the-hosts-memory": [
        (
            {**STREAMED, "model.name": "Qwen/Qwen3-8B"},
            Facts(machine=replace(H100, memory_bytes=16 * GiB), model=LARGE),
            "memory.layer_offloading",
            "error",
        )
    ],
    "layer-offloading-has-its-price": [
        (
            {**STREAMED, "model.name": "Qwen/Qwen3-8B", "optim.per_device_train_batch_size": size},
            Facts(machine=H100, model=LARGE),
            "memory.layer_offloading",
            severity,
        )
        for size, severity in ((2, "warning"), (4, "hint"))
    ],
    "layers-come-in-for-every-token-sampled": [
        ({**GRPO, **STREAMED}, Facts(machine=H100), "memory.layer_offloading", "warning")
    ],
    "tiles-need-tiled-mlp": [
        ({"memory.tiled_mlp_tokens": 512}, Facts(), "memory.tiled_mlp_tokens", "error"),
        ({"memory.tiled_mlp_fp32_sums": True}, Facts(), "memory.tiled_mlp_fp32_sums", "error"),
    ],
    "tiled-mlp-has-its-price": [
        (
            {
                **LORA,
                "model.name": "Qwen/Qwen3-8B",
                "memory.tiled_mlp": True,
                "data.max_length": length,
                "memory.gradient_checkpointing": tier,
            },
            Facts(machine=H100, model=LARGE),
            "memory.tiled_mlp",
            severity,
        )
        for length, tier, severity in ((65_536, True, "hint"), (65_536, False, "hint"), (256, True, "warning"))
    ],
    "a-tile-is-smaller-than-a-batch": [
        (
            {"memory.tiled_mlp": True, "memory.tiled_mlp_tokens": 16384, "optim.per_device_train_batch_size": 8},
            Facts(),
            "memory.tiled_mlp_tokens",
            "error",
        )
    ],
    "tiles-are-not-compiled": [
        ({"memory.tiled_mlp": True, "kernels.torch_compile": True}, Facts(), "kernels.torch_compile", "error"),
        (
            {"memory.tiled_mlp": True, "kernels.torch_compile_options": {"shape_padding": True}},
            Facts(),
            "kernels.torch_compile",
            "error",
        ),
    ],
    "tiles-need-a-block-of-tokens-by-themselves": [
        ({"memory.tiled_mlp": True}, model(model_type="gpt_oss", parameters=1000), "memory.tiled_mlp", "error")
    ],
    "fp32-norms-stand-between-fewer-bits": [
        ({"memory.fp32_norms": True, "model.dtype": "float32"}, Facts(), "memory.fp32_norms", "error")
    ],
}
