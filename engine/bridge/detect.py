"""Whose config a file is, by keys that one tool's files have and no other's; what is asked of every file, so no table is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.config.absent import other_file
from engine.config.tree import SECTIONS

TITLES = {"axolotl": "Axolotl", "llamafactory": "LLaMA-Factory", "trl": "TRL"}
"""The tools, as they are called in sentences."""
_MARKS = {
    "axolotl": ("base_model", "sequence_len", "micro_batch_size", "num_epochs", "sample_packing", "optimizer", "lr_scheduler", "rl", "lora_target_linear", "pretraining_dataset"),
    "llamafactory": ("stage", "finetuning_type", "cutoff_len", "template", "lora_rank", "lora_target", "pref_beta", "dataset", "neat_packing", "quantization_bit"),
    "trl": ("dataset_name", "use_peft", "max_length", "num_generations", "beta", "packing_strategy", "assistant_only_loss", "dataset_text_field", "dtype", "attn_implementation", "desirable_weight", "dataset_train_split"),
}  # fmt: skip


def detect(mapping: Mapping[str, Any]) -> str | None:
    """The name of the tool; nothing for a config of ours, for what is no training, and where it is not clear."""
    if any(isinstance(mapping.get(name), Mapping) for name in SECTIONS) or "version" in mapping or other_file(mapping):
        return None
    marks = {name: sum(key in mapping for key in keys) for name, keys in _MARKS.items()}
    if "model_name_or_path" in mapping:
        marks["llamafactory" if marks["llamafactory"] else "trl"] += 1
    best = max(marks, key=lambda name: marks[name])
    clear = marks[best] >= 2 and sum(count == marks[best] for count in marks.values()) == 1
    return best if clear else None
