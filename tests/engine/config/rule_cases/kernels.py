"""Where the rules of `engine.config.rules.kernels` speak."""

from __future__ import annotations

from engine.config.facts import Facts
from tests.engine.config.rule_cases.shared import CPU, H100, LORA, OLD, Case, model

CASES: dict[str, list[Case]] = {
    "fused-attention-needs-a-gpu": [
        ({"kernels.fused_attn_kernel": True}, Facts(machine=CPU), "kernels.fused_attn_kernel", "error")
    ],
    "fused-attention-needs-a-card-of-today": [
        ({"kernels.fused_attn_kernel": True}, Facts(machine=OLD), "kernels.fused_attn_kernel", "error")
    ],
    "fused-attention-knows-the-model": [
        (
            {"kernels.fused_attn_kernel": True},
            model(model_type="phi3", parameters=1000),
            "kernels.fused_attn_kernel",
            "error",
        )
    ],
    "rotation-alone-is-left-to-compiled-layers": [
        (
            {"kernels.fused_attn_kernel": True, "kernels.torch_compile": True},
            model(model_type="llama", parameters=1000),
            "kernels.fused_attn_kernel",
            "hint",
        )
    ],
    "fused-lora-needs-an-adapter": [
        ({"kernels.fused_lora": True, "adapter.kind": "none"}, Facts(), "kernels.fused_lora", "error")
    ],
    "fused-lora-is-plain-lora": [
        (
            {"kernels.fused_lora": True, "adapter.kind": "lora", "adapter.use_dora": True},
            Facts(),
            "kernels.fused_lora",
            "error",
        )
    ],
    "fused-lora-has-no-mixed-precision": [
        (
            {"kernels.fused_lora": True, "adapter.kind": "lora", "model.dtype": "float16"},
            Facts(machine=H100),
            "kernels.fused_lora",
            "error",
        )
    ],
    "fused-lora-reads-the-weights": [
        (
            {"kernels.fused_lora": True, "adapter.kind": "lora", **int8},
            Facts(machine=H100),
            "kernels.fused_lora",
            "error",
        )
        for int8 in ({"kernels.quantization_aware": True}, {"model.quantization": "int8"})
    ],
    "fused-lora-is-not-compiled": [
        ({"kernels.fused_lora": True, "adapter.kind": "lora", **compiled}, Facts(), "kernels.fused_lora", "error")
        for compiled in (
            {"kernels.torch_compile": True},
            {"kernels.torch_compile_options": {"shape_padding": True}},
        )
    ],
    "kernel-auto-compose-has-a-choice": [
        (
            {"kernels.kernel_auto_compose": True, "kernels.fused_attn_kernel": False, **given},
            facts,
            "kernels.kernel_auto_compose",
            "error",
        )
        for given, facts in (
            ({"kernels.use_cut_ce": False, "kernels.torch_compile": False}, Facts()),
            ({"kernels.use_cut_ce": False, "kernels.torch_compile_options": {"shape_padding": True}}, Facts()),
            ({"kernels.use_cut_ce": True, "kernels.torch_compile": False}, Facts(machine=CPU)),
            (
                {**LORA, "kernels.use_cut_ce": False, "kernels.torch_compile": False, "kernels.fused_lora": False},
                Facts(),
            ),
        )
    ],
    "kernel-auto-compose-needs-the-layers-on-the-card": [
        (
            {"kernels.kernel_auto_compose": True, "memory.layer_offloading": True, **LORA},
            Facts(),
            "kernels.kernel_auto_compose",
            "error",
        )
    ],
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
}
