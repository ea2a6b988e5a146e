"""Where the rules of `engine.planning.sharding` speak."""

from __future__ import annotations

from typing import Any

from engine.config.facts import Facts
from tests.engine.rules.rule_cases.shared import CPU, DPO, GRPO, LORA, Case, model

SHARED = {"distributed.strategy": "fsdp2", "run.devices": 2}
_BESIDE: dict[str, dict[str, Any]] = {
    "value-head": {**GRPO, "method.kind": "ppo"},
    "quantized-weights": {**LORA, "model.quantization": "int8"},
    "float16": {"model.dtype": "float16"},
    "fused-attention": {"kernels.fused_attn_kernel": True},
    "liger-kernels": {"kernels.use_liger_kernel": True},
    "timed-kernels": {"kernels.kernel_auto_compose": True},
    "quantization-aware": {"kernels.quantization_aware": True},
    "offloaded-layers": {**LORA, "memory.layer_offloading": True},
    "offloaded-activations": {"memory.activation_offloading": "cpu"},
    "fp32-norms": {"memory.fp32_norms": True, "adapter.kind": "none"},
    "optimizers-of-matrices": {"optim.optim": "dion"},
    "bfloat16-evaluation": {"optim.bf16_full_eval": True, "data.eval": [{"path": "e.jsonl"}]},
    "modules-to-save": {**LORA, "adapter.modules_to_save": ["embed_tokens"]},
    "faster-second-matrices": {**LORA, "adapter.loraplus_lr_ratio": 16.0},
    "dora": {**LORA, "adapter.use_dora": True},
    "compiled-4-bit-weights-asked-for": {**LORA, "model.quantization": "nf4", "kernels.torch_compile": True},
    "compiled-4-bit-weights-by-options": {
        **LORA,
        "model.quantization": "nf4",
        "kernels.torch_compile_options": {"max_autotune": True},
    },
}
OFFLOADED = {**SHARED, "distributed.cpu_offload": True}
CASES: dict[str, list[Case]] = {
    **{
        f"fsdp2-without-{name}": [({**SHARED, **beside}, Facts(), "distributed.strategy", "error")]
        for name, beside in _BESIDE.items()
    },
    "fsdp2-keeps-no-copy-of-an-adapter": [
        ({**SHARED, **LORA, **DPO, "adapter.path": "./before"}, Facts(), "distributed.strategy", "error")
    ],
    "fsdp2-without-packed-experts": [
        ({**SHARED, **LORA, "model.quantization": "nf4"}, model(experts=8), "distributed.strategy", "error"),
        ({**SHARED, **LORA}, model(experts=8, stored="mxfp4"), "distributed.strategy", "error"),
    ],
    "fsdp2-without-stored-fp8": [
        ({**SHARED, **LORA}, model(stored=stored), "distributed.strategy", "error") for stored in ("fp8", "awq")
    ],
    "fsdp2-without-parts-that-learn-to-see": [(SHARED, model(processor=True), "distributed.strategy", "error")],
    "fsdp2-needs-several-devices": [({"distributed.strategy": "fsdp2"}, Facts(), "distributed.strategy", "error")],
    "replicas-need-fsdp2": [
        (
            {"distributed.strategy": "ddp", "distributed.dp_shard_size": 2},
            Facts(),
            "distributed.dp_shard_size",
            "error",
        ),
        (
            {"run.devices": 4, "distributed.dp_replicate_size": 2, "model.dtype": "float16"},
            Facts(),
            "distributed.dp_replicate_size",
            "error",
        ),
        (
            {"run.devices": 2, "distributed.cpu_offload": True, "model.dtype": "float16"},
            Facts(),
            "distributed.cpu_offload",
            "error",
        ),
        (
            {**LORA, "run.devices": 2, "distributed.expert_parallel_size": 2, "distributed.dp_shard_size": 2},
            Facts(),
            "distributed.dp_shard_size",
            "error",
        ),
    ],
    "replicas-divide-the-processes": [
        ({"run.devices": 8, "distributed.dp_replicate_size": many}, Facts(), "distributed.dp_replicate_size", "error")
        for many in (3, 8)
    ]
    + [
        ({"run.devices": 8, "distributed.dp_shard_size": many}, Facts(), "distributed.dp_shard_size", "error")
        for many in (1, 3, 4)
    ],
    "reshard-needs-fsdp2": [
        (
            {"distributed.strategy": "ddp", "distributed.reshard_after_forward": False},
            Facts(),
            "distributed.reshard_after_forward",
            "error",
        )
    ],
    "cpu-offload-needs-fsdp2": [
        ({**OFFLOADED, "distributed.strategy": "ddp"}, Facts(), "distributed.cpu_offload", "error")
    ],
    "cpu-offload-needs-several-devices": [
        ({"distributed.cpu_offload": True}, Facts(), "distributed.cpu_offload", "error")
    ],
    "cpu-offload-without-quantized-weights": [
        ({**OFFLOADED, **LORA, "model.quantization": "nf4"}, Facts(), "distributed.cpu_offload", "error")
    ],
    "cpu-offload-needs-gpus": [(OFFLOADED, Facts(machine=CPU), "distributed.cpu_offload", "error")],
    "cpu-offload-steps-with-adam": [({**OFFLOADED, "optim.optim": "adagrad"}, Facts(), "optim.optim", "error")],
}
