"""Other tools' names for our settings: such a key is an error whose fix writes the value where it belongs.

`translate(key, value)` gives the settings to write; nothing when the key is not known from another tool. `INSTEAD` has
sentences for keys that no setting answers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Changes = dict[str, Any]

# The same value under our name.
NAMES: dict[str, str] = {
    "base_model": "model.name",
    "model_name_or_path": "model.name",
    "model_name": "model.name",
    "model_id": "model.name",
    "pretrained_model_name_or_path": "model.name",
    "model_revision": "model.revision",
    "revision_of_model": "model.revision",
    "tokenizer_config": "model.tokenizer",
    "tokenizer_name_or_path": "model.tokenizer",
    "tokenizer_name": "model.tokenizer",
    "chat_template_path": "model.chat_template",
    "chat_template_jinja": "model.chat_template",
    "template": "model.chat_template",
    "torch_dtype": "model.dtype",
    "attn_implementation": "model.attention",
    "rl": "method.kind",
    "rl_beta": "method.beta",
    "dpo_beta": "method.beta",
    "pref_beta": "method.beta",
    "pref_loss": "method.loss_type",
    "dpo_label_smoothing": "method.label_smoothing",
    "pref_ftx": "method.rpo_alpha",
    "finetuning_type": "adapter.kind",
    "lora_r": "adapter.r",
    "lora_rank": "adapter.r",
    "rank": "adapter.r",
    "alpha": "adapter.lora_alpha",
    "dropout": "adapter.lora_dropout",
    "lora_target": "adapter.target_modules",
    "lora_target_modules": "adapter.target_modules",
    "lora_target_parameters": "adapter.target_parameters",
    "lora_modules_to_save": "adapter.modules_to_save",
    "additional_target": "adapter.modules_to_save",
    "peft_use_rslora": "adapter.use_rslora",
    "peft_use_dora": "adapter.use_dora",
    "use_rs_lora": "adapter.use_rslora",
    "sequence_len": "data.max_length",
    "sequence_length": "data.max_length",
    "cutoff_len": "data.max_length",
    "max_seq_length": "data.max_length",
    "max_seq_len": "data.max_length",
    "model_max_length": "data.max_length",
    "excess_length_strategy": "data.excess_length",
    "sample_packing": "data.packing",
    "pack_sequences": "data.packing",
    "num_epochs": "optim.num_train_epochs",
    "epochs": "optim.num_train_epochs",
    "lr": "optim.learning_rate",
    "micro_batch_size": "optim.per_device_train_batch_size",
    "batch_size": "optim.per_device_train_batch_size",
    "train_batch_size": "optim.per_device_train_batch_size",
    "eval_batch_size": "optim.per_device_eval_batch_size",
    "grad_accum_steps": "optim.gradient_accumulation_steps",
    "gradient_accumulation": "optim.gradient_accumulation_steps",
    "optimizer": "optim.optim",
    "lr_scheduler": "optim.lr_scheduler_type",
    "scheduler": "optim.lr_scheduler_type",
    "warmup_ratio": "optim.warmup_steps",
    "adam_eps": "optim.adam_epsilon",
    "max_grad_clip": "optim.max_grad_norm",
    "gradient_clipping": "optim.max_grad_norm",
    "cut_cross_entropy": "kernels.use_cut_ce",
    "checkpoint_steps": "run.save_steps",
    "run_name": "run.name",
    "output_path": "run.output_dir",
    "out_dir": "run.output_dir",
    "log_steps": "run.logging_steps",
}


def _datasets(value: Any) -> Changes | None:
    entries = value if isinstance(value, list) else [value]
    sources = []
    for entry in entries:
        if isinstance(entry, str):
            sources.append({"path": entry})
        elif isinstance(entry, dict) and isinstance(entry.get("path"), str):
            formats = {"alpaca": "alpaca", "sharegpt": "sharegpt", "chat_template": "messages", "completion": "text"}
            source = {"path": entry["path"]}
            if entry.get("type") in formats:
                source["format"] = formats[entry["type"]]
            if isinstance(entry.get("split"), str):
                source["split"] = entry["split"]
            sources.append(source)
        else:
            return None
    return {"data.train": sources}


def _held_out(value: Any) -> Changes | None:
    found = _datasets(value)
    return {"data.eval": found["data.train"]} if found else None


def _flag(changes: Changes) -> Callable[[Any], Changes | None]:
    return lambda value: changes if value is True or str(value).lower() in ("true", "yes", "on") else {}


def _bf16(value: Any) -> Changes | None:
    return _flag({"model.dtype": "bfloat16"})(True if str(value).lower() in ("auto", "full") else value)


def _stage(value: Any) -> Changes | None:
    kinds = {"sft": "sft", "pt": "pretrain", "dpo": "dpo", "kto": "kto", "rm": "reward", "ppo": "ppo"}
    return {"method.kind": kinds[value]} if value in kinds else {"method.kind": value}


def _finetuning_type(value: Any) -> Changes | None:
    return {"adapter.kind": {"full": "none"}.get(value, value)}


def _targets(value: Any) -> Changes | None:
    """A name alone is a list of one here, and "all" are all linear layers."""
    if isinstance(value, str) and value.strip().lower() in ("all", "all-linear", "all_linear"):
        return {"adapter.target_modules": "all-linear"}
    word = isinstance(value, str) and value.strip().replace("_", "").isalnum()
    return {"adapter.target_modules": [value.strip()] if word else value}


# Keys whose value is said in another way.
CHANGES: dict[str, Callable[[Any], Changes | None]] = {
    "datasets": _datasets,
    "dataset": _datasets,
    "dataset_name": _datasets,
    "train_file": _datasets,
    "train_files": _datasets,
    "test_datasets": _held_out,
    "eval_dataset": _held_out,
    "load_in_4bit": _flag({"model.quantization": "nf4"}),
    "load_in_8bit": _flag({"model.quantization": "int8"}),
    "bf16": _bf16,
    "fp16": _flag({"model.dtype": "float16"}),
    "fp8": _flag({"kernels.quantization_aware": "fp8"}),
    "flash_attention": _flag({"model.attention": "flash_attention_2"}),
    "reward_model": _flag({"method.kind": "reward"}),
    "process_reward_model": _flag({"method.kind": "prm"}),
    "lora_target": _targets,
    "lora_target_modules": _targets,
    "lora_target_linear": _flag({"adapter.target_modules": "all-linear"}),
    "use_peft": _flag({"adapter.kind": "lora"}),
    "train_on_inputs": _flag({"data.trained_turns": "all"}),
    "stage": _stage,
    "finetuning_type": _finetuning_type,
    "quantization_bit": lambda value: {"model.quantization": {4: "nf4", 8: "int8"}.get(value, value)},
}


# What another tool's setting asks for has another place here, or happens by itself.
INSTEAD: dict[str, str] = {
    "val_set_size": "Nothing is held out of the training rows by itself: name the held-out rows under data.eval.",
    "test_size": "Nothing is held out of the training rows by itself: name the held-out rows under data.eval.",
    "evals_per_epoch": "run.eval_steps counts steps; left out, a run evaluates ten times.",
    "saves_per_epoch": "run.save_steps counts steps, and the end of a run is always kept.",
    "save_strategy": "run.save_steps counts steps, and the end of a run is always kept.",
    "eval_strategy": "Whoever names rows under data.eval has them evaluated every run.eval_steps steps.",
    "pad_to_sequence_len": "A batch is padded to its longest row, and packs need no padding.",
    "special_tokens": "They are the tokenizer's: model.tokenizer names another.",
    "wandb_project": "A run keeps its curves in its own folder.",
    "report_to": "A run keeps its curves in its own folder.",
    "dataset_prepared_path": "Prepared rows are kept in the cache of this machine by themselves.",
    "group_by_length": "data.packing fills batches whatever the rows' lengths are.",
}


def translate(key: str, value: Any) -> Changes | None:
    """The settings that another tool's `key: value` stands for; nothing when no other tool's name is known."""
    if key in CHANGES:
        return CHANGES[key](value)
    if key in NAMES:
        return {NAMES[key]: value}
    return None
