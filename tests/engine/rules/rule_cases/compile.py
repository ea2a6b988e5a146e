"""Where the rules of `engine.features.compile` speak."""

from __future__ import annotations

from engine.config.facts import Facts
from engine.hardware import Machine
from tests.engine.rules.rule_cases.shared import (
    LORA,
    Case,
    model,
    source,
)

CASES: dict[str, list[Case]] = {
    "torch-compile-options-are-known": [
        (
            {"kernels.torch_compile_options": {"shape_paddding": True}},
            Facts(),
            "kernels.torch_compile_options.shape_paddding",
            "error",
        )
    ],
    "torch-compile-options-are-switches": [
        (
            {"kernels.torch_compile_options": {"shape_padding": "yes please"}},
            Facts(),
            "kernels.torch_compile_options.shape_padding",
            "error",
        )
    ],
    "torch-compile-options-need-torch-compile": [
        (
            {"kernels.torch_compile": False, "kernels.torch_compile_options": {"shape_padding": True}},
            Facts(),
            "kernels.torch_compile_options",
            "error",
        )
    ],
    "dora-breaks-compiled-layers": [
        ({**LORA, "adapter.use_dora": True, **compiled}, Facts(), "kernels.torch_compile", "hint")
        for compiled in (
            {"kernels.torch_compile": True},
            {"kernels.torch_compile_options": {"shape_padding": True}},
        )
    ],
    "cuda-graphs-need-one-shape": [
        (
            {
                "kernels.torch_compile": True,
                "kernels.torch_compile_options": {"triton.cudagraphs": True},
                "data.packing": packing,
            },
            Facts(),
            "kernels.torch_compile_options.triton.cudagraphs",
            "warning",
        )
        for packing in (False, True)
    ],
    "a-recorded-stack-computes-what-was-recorded": [
        (
            {"kernels.torch_compile_options": {"stack_cudagraph": True}, **changes},
            facts,
            "kernels.torch_compile_options.stack_cudagraph",
            "error",
        )
        for changes, facts in (
            ({}, Facts(machine=Machine())),
            ({"method": {"kind": "grpo"}}, Facts()),
            ({"memory.activation_offloading": "cpu"}, Facts()),
            ({"distributed.strategy": "fsdp2"}, Facts()),
            ({"adapter": {"kind": "lora", "lora_dropout": 0.1}}, Facts()),
            ({"run.devices": 2}, Facts()),
            ({"method": {"kind": "dpo"}}, Facts()),
            ({}, model(experts=8, model_type="mixtral")),
            ({}, source(images="line 4")),
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
    "full-determinism-tunes-nothing": [
        (
            {"run.full_determinism": True, "kernels.torch_compile_options": {"max_autotune_gemm": True}},
            Facts(),
            "kernels.torch_compile_options.max_autotune_gemm",
            "error",
        )
    ],
}
