"""Other tools' names for our settings: such a key is an error, and where its value's meaning is known, its fix writes it.

`translate(key, value, file)` gives the settings to write: an empty mapping where the key asks for nothing, nothing where
the key or its value is not known. `sentence_for` and `is_needless` answer keys that no setting answers. What is not
here yet stands in `engine.config.absent`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.config.files import DATA_SUFFIXES

Changes = dict[str, Any]
File = Mapping[str, Any]
Meaning = Callable[[Any, File], Changes | None]

# The same value under our name.
NAMES: dict[str, str] = {
    "cp_size": "distributed.context_parallel_size",
    "ep_size": "distributed.expert_parallel_size",
    "expert_model_parallel_size": "distributed.expert_parallel_size",
    "sequence_parallel_degree": "distributed.context_parallel_size",
    "base_model": "model.name",
    "model_name_or_path": "model.name",
    "model_name": "model.name",
    "model_id": "model.name",
    "pretrained_model_name_or_path": "model.name",
    "model_revision": "model.revision",
    "freeze_vision_tower": "model.train_vision",
    "freeze_multi_modal_projector": "model.train_vision",
    "media_dir": "data.image_base_dir",
    "revision_of_model": "model.revision",
    "tokenizer_config": "model.tokenizer",
    "tokenizer_name_or_path": "model.tokenizer",
    "tokenizer_name": "model.tokenizer",
    "chat_template_path": "model.chat_template",
    "chat_template_jinja": "model.chat_template",
    "torch_dtype": "model.dtype",
    "attn_implementation": "model.attention",
    "rl_beta": "method.beta",
    "dpo_beta": "method.beta",
    "pref_beta": "method.beta",
    "pref_loss": "method.loss_type",
    "dpo_label_smoothing": "method.label_smoothing",
    "pref_ftx": "method.rpo_alpha",
    "orpo_alpha": "method.beta",
    "kto_desirable_weight": "method.desirable_weight",
    "kto_chosen_weight": "method.desirable_weight",
    "kto_undesirable_weight": "method.undesirable_weight",
    "kto_rejected_weight": "method.undesirable_weight",
    "noisy_embedding_alpha": "optim.neftune_noise_alpha",
    "lora_model_dir": "adapter.path",
    "adapter_name_or_path": "adapter.path",
    "adapter_path": "adapter.path",
    "lora_r": "adapter.r",
    "lora_rank": "adapter.r",
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
    "pack_sequences": "data.packing",
    "num_epochs": "optim.num_train_epochs",
    "epochs": "optim.num_train_epochs",
    "lr": "optim.learning_rate",
    "micro_batch_size": "optim.per_device_train_batch_size",
    "grad_accum_steps": "optim.gradient_accumulation_steps",
    "gradient_accumulation": "optim.gradient_accumulation_steps",
    "optimizer": "optim.optim",
    "lr_scheduler": "optim.lr_scheduler_type",
    "scheduler": "optim.lr_scheduler_type",
    "adam_eps": "optim.adam_epsilon",
    "max_grad_clip": "optim.max_grad_norm",
    "gradient_clipping": "optim.max_grad_norm",
    "cut_cross_entropy": "kernels.use_cut_ce",
    "enable_liger_kernel": "kernels.use_liger_kernel",
    "checkpoint_steps": "run.save_steps",
    "run_name": "run.name",
    "output_path": "run.output_dir",
    "out_dir": "run.output_dir",
    "log_steps": "run.logging_steps",
}


TEMPLATES = ("chatml", "llama3")
"""Chat templates that bear one name in every tool."""
_KINDS = ("sft", "dpo", "ipo", "simpo", "orpo", "kto", "grpo", "gdpo", "ppo")
_TRUE = ("true", "yes", "on")


def _is_on(value: Any) -> bool:
    return value is True or str(value).lower() in _TRUE


def is_off(value: Any) -> bool:
    """Whether a value asks for nothing: empty, false, 0 or `none`."""
    return (
        value is None
        or (isinstance(value, (bool, int, float)) and not value)
        or (isinstance(value, (str, list, tuple, dict)) and not value)
        or (isinstance(value, str) and value.strip().lower() in ("", "none", "null", "false", "no", "off"))
    )


def _flag(changes: Changes) -> Meaning:
    def meaning(value: Any, file: File) -> Changes | None:
        return changes if _is_on(value) else {} if is_off(value) else None

    return meaning


def _datasets(value: Any, file: File) -> Changes | None:
    """The entries as they are: what one of them says besides is answered where it then stands."""
    entries = value if isinstance(value, list) else [value]
    whole = bool(entries) and all(isinstance(entry, dict) and isinstance(entry.get("path"), str) for entry in entries)
    return {"data.train": [dict(entry) for entry in entries]} if whole else _source(value, file)


def _source(value: Any, file: File) -> Changes | None:
    """Names that can be nothing but places: a file by its ending or a path, a data set by its owner."""
    names = value if isinstance(value, list) else [value]
    return {"data.train": [{"path": name} for name in names]} if names and all(map(_is_place, names)) else None


def _is_place(name: Any) -> bool:
    if not isinstance(name, str) or "," in name or any(mark.isspace() for mark in name):
        return False
    return name.lower().endswith(DATA_SUFFIXES) or "/" in name


def _unless_off(path: str) -> Meaning:
    """Our setting of this name, off being nothing to write."""
    return lambda value, file: {} if is_off(value) else {path: value}


def _held_out(of: Meaning) -> Meaning:
    def meaning(value: Any, file: File) -> Changes | None:
        changes = of(value, file)
        return {"data.eval": changes["data.train"]} if changes else {} if value in (None, False) else None

    return meaning


def _four_bits(value: Any, file: File) -> Changes | None:
    kind = file.get("bnb_4bit_quant_type", file.get("quantization_type", "nf4"))
    if not _is_on(value):
        return {} if is_off(value) else None
    return {"model.quantization": kind} if kind in ("nf4", "fp4") else None


def _bf16(value: Any, file: File) -> Changes | None:
    return _flag({"model.dtype": "bfloat16"})(True if str(value).lower() in ("auto", "full") else value, file)


def _rl(value: Any, file: File) -> Changes | None:
    return {"method.kind": value} if value in _KINDS else {} if value is None else None


def _stage(value: Any, file: File) -> Changes | None:
    """What LLaMA-Factory calls the stage; its DPO is the method that `pref_loss` names."""
    if value == "dpo":
        return _pref_loss(file.get("pref_loss", "sigmoid"), file, alone=False)
    kinds = {"sft": "sft", "pt": "pretrain", "kto": "kto", "rm": "reward", "ppo": "ppo"}
    return {"method.kind": kinds[value]} if isinstance(value, str) and value in kinds else None


def _pref_loss(value: Any, file: File, *, alone: bool = True) -> Changes | None:
    if value in ("orpo", "simpo", "ipo"):
        return {"method.kind": value}
    if value not in ("sigmoid", "hinge"):
        return None
    return {"method.loss_type": value} if alone else {"method.kind": "dpo"}


def _finetuning_type(value: Any, file: File) -> Changes | None:
    kinds = {"full": "none", "none": "none", "lora": "lora"}
    return {"adapter.kind": kinds[value]} if isinstance(value, str) and value in kinds else None


def _targets(value: Any, file: File) -> Changes | None:
    """A name alone is a list of one here, and "all" are all linear layers."""
    if isinstance(value, str) and value.strip().lower() in ("all", "all-linear", "all_linear"):
        return {"adapter.target_modules": "all-linear"}
    word = isinstance(value, str) and value.strip().replace("_", "").isalnum()
    return {"adapter.target_modules": [value.strip()] if word else value}


def _packing(value: Any, file: File) -> Changes | None:
    """Axolotl's packs keep their rows apart."""
    if not isinstance(value, bool):
        return None
    return {"data.packing": True, "data.packing_cross_doc_attn_mask": True} if value else {"data.packing": False}


def _eval_packing(value: Any, file: File) -> Changes | None:
    """Held-out rows are packed here as the others are."""
    section = file.get("data")
    packed = section.get("packing", False) if isinstance(section, Mapping) else False
    return {} if value is None or value == file.get("sample_packing", packed) else None


def _warmup(value: Any, file: File) -> Changes | None:
    share = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1
    return {"optim.warmup_steps": value} if share else None


def _bits(value: Any, file: File) -> Changes | None:
    kinds = {4: "nf4", 8: "int8"}
    return {"model.quantization": kinds[value]} if value in (4, 8) else {} if value is None else None


# Keys whose value is said in another way.
CHANGES: dict[str, Meaning] = {
    "datasets": _datasets,
    "dataset": _source,
    "dataset_name": _source,
    "train_file": _source,
    "train_files": _source,
    "test_datasets": _held_out(_datasets),
    "eval_dataset": _held_out(_source),
    "early_stopping_steps": _unless_off("optim.early_stopping_patience"),
    "val_size": _unless_off("data.val_set_size"),
    "test_size": _unless_off("data.val_set_size"),
    "load_in_4bit": _four_bits,
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
    "rl": _rl,
    "stage": _stage,
    "pref_loss": _pref_loss,
    "finetuning_type": _finetuning_type,
    "quantization_bit": _bits,
    "sample_packing": _packing,
    "eval_sample_packing": _eval_packing,
    "warmup_ratio": _warmup,
}

_PLACES = "data.train and data.eval take a file, a folder or a data set with its owner, as in owner/name."
# Where our own name takes other values elsewhere: which mean the same here, and what to do about the others.
SAME_HERE: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model.chat_template": (
        lambda value: isinstance(value, str) and (value in TEMPLATES or value.lower().endswith((".jinja", ".j2"))),
        "Names of templates differ between tools: left out, the tokenizer's own is taken; here it takes chatml, llama3, "
        "plain or a Jinja file.",
    ),
    "data.train": (lambda value: _datasets(value, {}) is not None, _PLACES),
    "data.eval": (lambda value: _datasets(value, {}) is not None, _PLACES),
}

# The formats of an axolotl source that say no more than one of ours.
ENTRY_TYPES = {"alpaca": "alpaca", "sharegpt": "sharegpt", "chat_template": "messages", "completion": "text"}


def translate(key: str, value: Any, file: File | None = None) -> Changes | None:
    """The settings that another tool's `key: value` stands for in this file; nothing where that is not known."""
    if key in CHANGES:
        return CHANGES[key](value, file or {})
    if key in NAMES:
        return {} if value is None else {NAMES[key]: value}
    return None


_SAVES = "run.save_steps counts steps, and the end of a run is always kept."
_NODES = "distributed.nodes says on how many machines a run works."
_MEETING = (
    "Each machine is told its place when it starts: workbench train FILE --nodes 2 --node-rank 1 --rdzv-endpoint HOST."
)
_WORKERS = "Rows are prepared before the run and read from memory; how many processes do it is no setting."
_DEVICE_BATCH = (
    "Tools differ in whether it counts the rows of one device or of a whole step: "
    "optim.per_device_train_batch_size counts those of one device, optim.gradient_accumulation_steps its batches."
)
_LIGER = "kernels.use_liger_kernel takes Liger's kernels, and kernels.liger_kernel_config says of which parts."
_CLASS = "The class follows from the model's own config.json, so nothing needs to name it."
_LORA = "It may be another thing than LoRA's: write it under adapter as {}."

# What another tool's setting asks for has another place here. Removed by a fix only where its value asks for nothing.
INSTEAD: dict[str, str] = {
    "eval_strategy": "Whoever names rows under data.eval has them evaluated every run.eval_steps steps.",
    "evaluation_strategy": "Whoever names rows under data.eval has them evaluated every run.eval_steps steps.",
    "save_strategy": _SAVES,
    "load_best_model_at_end": "The best checkpoint by held-out rows is kept and named beside the last.",
    "save_only_model": "Every checkpoint holds what a run needs to go on.",
    "special_tokens": "They are the tokenizer's: model.tokenizer names another.",
    "group_by_length": "data.packing fills batches whatever the rows' lengths are.",
    "eval_sample_packing": "Held-out rows are packed as data.packing says of all rows.",
    "max_samples": "A source takes so many rows with `rows` below its path in data.train.",
    "template": "Templates of other tools have names of their own: left out, the tokenizer's own is taken; "
    "model.chat_template takes chatml, llama3, plain or a Jinja file.",
    "dataset": "A name in another tool's list of data sets is no place: give the file of each below data.train.",
    "eval_dataset": "A name in another tool's list of data sets is no place: give the file of each below data.eval.",
    "datasets": "Each source below data.train has a path of its own.",
    "dataset_name": "data.train takes a file, a folder or a data set with its owner, as in owner/name.",
    "dataset_config": "The part of a data set has no setting here: bring its rows as a file of their own.",
    "dataset_config_name": "The part of a data set has no setting here: bring its rows as a file of their own.",
    "dataset_mixture": "data.train takes one entry for each source.",
    "batch_size": _DEVICE_BATCH,
    "train_batch_size": _DEVICE_BATCH,
    "eval_batch_size": "optim.per_device_eval_batch_size counts the held-out rows of one device.",
    "rank": _LORA.format("r"),
    "alpha": _LORA.format("lora_alpha"),
    "dropout": _LORA.format("lora_dropout"),
    "model_type": _CLASS,
    "tokenizer_type": _CLASS,
    "num_labels": "A reward model has one score, a process reward model a verdict on each step: method.kind says which.",
    "num_processes": "run.devices says on how many GPUs a run works.",
    "ring_attn_func": "distributed.context_parallel_size divides rows over GPUs; its ring is torch's own.",
    "heads_k_stride": "distributed.context_parallel_size divides rows over GPUs; its ring is torch's own.",
    "num_machines": _NODES,
    "num_nodes": _NODES,
    "nnodes": _NODES,
    "node_rank": _MEETING,
    "machine_rank": _MEETING,
    "main_process_ip": _MEETING,
    "master_addr": _MEETING,
    "gpu_ids": "run.devices says on which GPUs a run works.",
    "liger_rope": _LIGER,
    "liger_rms_norm": _LIGER,
    "liger_glu_activation": _LIGER,
    "mixed_precision": "model.dtype says in which numbers a run computes.",
    "peft_config": "Its settings stand below adapter, with kind: lora.",
    "lora_config": "Its settings stand below adapter, with kind: lora.",
    "quantization_config": "model.quantization names how the base weights are held: nf4, fp4, int8, fp8, mxfp4 or nvfp4.",
    "bnb_4bit_quant_type": "model.quantization says it: nf4 or fp4.",
    "quantization_type": "model.quantization says it: nf4 or fp4.",
    "quantization_method": "model.quantization names how the base weights are held: nf4, fp4, int8, fp8, mxfp4 or nvfp4.",
    "pretraining_dataset": "Plain text is named below data.train, with method.kind pretrain; reading it as a stream is "
    "not here yet.",
    "freeze_trainable_layers": "adapter.unfrozen_parameters names the weights that are trained, with kind: none.",
    "resume_from_checkpoint": "`workbench resume RUN` goes on with a run.",
    "loss_watchdog_threshold": "A loss that is not finite ends a run by itself; no other value does.",
    "loss_watchdog_patience": "A loss that is not finite ends a run by itself; no other value does.",
    "shuffle_merged_datasets": "data.shuffle mixes the rows of all sources.",
    "conversation": "The preview says what was seen in the rows; format and columns of a source say it otherwise.",
    "do_train": "A config is always trained; `workbench check` and `workbench preview` look at one without.",
    "do_eval": "Whoever names rows under data.eval has them evaluated.",
    "do_predict": "Answers to run.prompts are sampled while a run trains.",
    "wandb_name": "run.name names a run.",
    "max_prompt_length": "data.max_length bounds a row, its prompt and its answer together.",
    "warmup_ratio": "optim.warmup_steps takes a share of all steps below 1, or a number of steps from 1 on.",
    "pref_loss": "method.kind and method.loss_type name the loss.",
    "stage": "method.kind names the method.",
    "rl": "method.kind names the method.",
}

# What another tool's setting asks for happens by itself, or changes nothing of what is learned.
NEEDLESS: dict[str, str] = {
    "pad_to_sequence_len": "A batch is padded to its longest row, and packs need no padding.",
    "dataset_prepared_path": "Prepared rows are kept in the cache of this machine by themselves.",
    "overwrite_cache": "Prepared rows are made anew by themselves when their source changes.",
    "overwrite_output_dir": "Every run has a folder of its own.",
    "remove_unused_columns": "A row gives what its method learns from, whatever columns stand beside.",
    "preprocessing_num_workers": _WORKERS,
    "dataset_processes": _WORKERS,
    "dataset_num_proc": _WORKERS,
    "dataloader_pin_memory": _WORKERS,
    "plot_loss": "The loss is plotted while a run trains and afterwards.",
    "save_first_step": "`workbench estimate --rehearse` shows before a run whether it would work.",
    "gradient_checkpointing_kwargs": "Checkpointing has no settings of its own: memory.gradient_checkpointing chooses it.",
    "pretrain_multipack_attn": "data.packing_cross_doc_attn_mask keeps packed rows apart.",
    "logging_first_step": "The first step is always written down.",
    "disable_tqdm": "`workbench watch` shows a run, and leaving it stops nothing.",
}
_NEEDLESS_VALUES: dict[str, tuple[Any, ...]] = {
    "model_type": ("AutoModelForCausalLM",),
    "tokenizer_type": ("AutoTokenizer",),
    "save_strategy": ("steps",),
    "do_train": (True,),
}


def sentence_for(key: str) -> str:
    """What to do about another tool's key that no setting answers; empty where the key is not known."""
    return INSTEAD.get(key) or NEEDLESS.get(key, "")


def is_needless(key: str, value: Any) -> bool:
    """Whether a file without this key would say the same."""
    if key in NEEDLESS or value in _NEEDLESS_VALUES.get(key, ()):
        return True
    return key in INSTEAD and is_off(value)
