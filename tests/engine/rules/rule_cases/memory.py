"""Where the rules of `engine.rules.memory` speak."""

from __future__ import annotations

from dataclasses import replace

from engine.config.facts import Facts
from engine.hardware import GiB, parse_machine
from engine.planning.memory_model import MiB
from tests.engine.rules.rule_cases.shared import CPU, H100, LARGE, LORA, STREAMED, TINY_FACTS, Case, source

_SHARED = {"distributed.strategy": "fsdp2", "run.devices": 2}

CASES: dict[str, list[Case]] = {
    "a-size-of-scores-needs-a-head-that-has-one": [
        ({"kernels.cut_ce_workspace": 640, **changes}, Facts(machine=machine), "kernels.cut_ce_workspace", "warning")
        for machine, changes in ((CPU, {}), (parse_machine("1xA100-80GB"), {}), (parse_machine("2xH100-80GB"), _SHARED))
    ],
    "layers-computed-again-are-fewer-than-all": [
        (
            {"memory.recompute_num_layers": asked, "memory.gradient_checkpointing": tier},
            Facts(machine=H100, model=TINY_FACTS),
            "memory.recompute_num_layers",
            "warning",
        )
        for asked, tier in ((1, "auto"), (100, "full"))
    ],
    "offloading-to-disk-takes-time": [
        (
            {"model.name": "Qwen/Qwen3-8B", **LORA, "memory.activation_offloading": "disk"},
            Facts(machine=H100, model=LARGE),
            "memory.activation_offloading",
            "warning",
        )
    ],
    "offloading-both-needs-checkpoints": [
        (
            {**STREAMED, "memory.activation_offloading": "cpu", "memory.gradient_checkpointing": False},
            Facts(machine=H100),
            "memory.gradient_checkpointing",
            "error",
        )
    ],
    "waiting-batches-fit-into-shared-memory": [
        (
            {"data.dataloader_num_workers": 4},
            Facts(machine=replace(H100, shared_memory_bytes=64 * MiB), sources=source(images="line 4").sources),
            "data.dataloader_num_workers",
            "warning",
        )
    ],
    "kept-images-fit-into-main-memory": [
        (
            {"data.dataloader_num_workers": 4, "data.image_cache_size": 8192, "run.devices": 2},
            Facts(machine=replace(H100, memory_bytes=64 * GiB), sources=source(images="line 4").sources),
            "data.image_cache_size",
            "warning",
        )
    ],
    "replayed-groups-fit-into-main-memory": [
        (
            {
                "method.kind": "grpo",
                "method.reward_funcs": ["length:8"],
                "method.replay_buffer_size": 65_536,
                "run.devices": 2,
                "method.max_completion_length": 16_384,
            },
            Facts(machine=replace(H100, memory_bytes=64 * GiB)),
            "method.replay_buffer_size",
            "warning",
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
    "the-scratch-folder-is-of-use": [
        (
            {"memory.activation_offloading": "disk"},
            Facts(scratch="there is no such folder"),
            "memory.activation_offloading",
            "error",
        ),
        ({"data.train": [{"path": "rows.jsonl.gz"}]}, Facts(scratch="it is no folder"), "data.train", "error"),
    ],
    "sums-in-float32-need-weights-of-fewer-bits": [
        (
            {"memory.tiled_mlp": True, "memory.tiled_mlp_fp32_sums": True, "model.dtype": "float32"},
            Facts(),
            "memory.tiled_mlp_fp32_sums",
            "error",
        ),
        (
            {
                **LORA,
                "adapter.autocast_adapter_dtype": True,
                "memory.tiled_mlp": True,
                "memory.tiled_mlp_fp32_sums": True,
            },
            Facts(),
            "memory.tiled_mlp_fp32_sums",
            "error",
        ),
    ],
}
