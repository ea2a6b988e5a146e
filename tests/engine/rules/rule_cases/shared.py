"""What the cases of all rules are made of: a plain config, machines, facts, and settings by their dotted names."""

from __future__ import annotations

from typing import Any

from engine.config.facts import DataFacts, Facts, ModelFacts, SourceFacts
from engine.facts.model_shape import model_facts
from engine.hardware import GiB, Machine, parse_machine

GOOD: dict[str, Any] = {"model": {"name": "builtin/tiny"}, "data": {"train": [{"path": "rows.jsonl"}]}}
CPU = Machine(cpu_count=4, memory_bytes=16 * GiB, disk_free_bytes=100 * GiB, name="cpu")
H100, OLD = parse_machine("1xH100-80GB"), parse_machine("1xT4-16GB")
CLUSTER = parse_machine("2x8xH100-80GB")
LARGE = model_facts("Qwen/Qwen3-8B")
NOTHING: dict[str, str | None] = dict.fromkeys(
    ("bitsandbytes", "flash-attn", "flash-attn-3", "flash-attn-4", "torchao", "pytorch-optimizer", "schedulefree")
)


def rows(**known: Any) -> Facts:
    return Facts(data=DataFacts(**known))


def source(**known: Any) -> Facts:
    return Facts(sources={"rows.jsonl": SourceFacts("rows.jsonl", **{"exists": True, **known})})


def model(**known: Any) -> Facts:
    return Facts(model=ModelFacts("builtin/tiny", **known))


TINY_FACTS = model_facts("builtin/tiny")
LORA = {"adapter.kind": "lora"}
STREAMED = {**LORA, "memory.layer_offloading": True}
DPO = {"method.kind": "dpo"}
KTO = {"method.kind": "kto"}
FP8, INT8 = {"kernels.quantization_aware": "fp8"}, {"kernels.quantization_aware": True}
FP8_BASE = {**LORA, "model.quantization": "fp8"}
APART = {"data.packing": True, "data.packing_cross_doc_attn_mask": True}
POLYNOMIAL = {"optim.lr_scheduler_type": "polynomial", "optim.lr_scheduler_kwargs": {"power": 2.0}}
GRPO = {"method.kind": "grpo", "method.reward_funcs": ["exact_match"], "optim.per_device_train_batch_size": 8}
Case = tuple[dict[str, Any], Facts, str, str]
"""Settings on top of GOOD, facts, where the finding stands, and its severity."""
