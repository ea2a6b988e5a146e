"""Our settings as Axolotl's keys: the inverse of `engine.bridge.axolotl`, for what both can say."""

from __future__ import annotations

from typing import Any

from engine.bridge.axolotl.values import NO_WARMUP, PAIRS
from engine.bridge.giving import (
    BALANCED,
    Giving,
    Meaning,
    always,
    attention,
    by_itself,
    checkpointing,
    choice,
    eval_steps,
    filled,
    key,
    module_of,
    of_galore,
    of_new_adapter,
    off,
    optimizer,
    placed,
    quantization,
    reference,
    resolved_rate,
    rewards,
    save_steps,
    sliced,
)
from engine.bridge.keys import Answer, changed, mapped, needless, unsupported
from engine.config.data import DataSource
from engine.config.tree import fields
from engine.features import liger_kernel

_KINDS = {
    **{kind: mapped({"rl": kind}) for kind in ("dpo", "ipo", "simpo", "orpo", "kto", "grpo", "gdpo")},
    "reward": mapped({"reward_model": True, "model_type": "AutoModelForSequenceClassification", "num_labels": 1}),
    "prm": mapped({"process_reward_model": True, "model_type": "AutoModelForTokenClassification", "num_labels": 2}),
    "pretrain": needless("A source of type completion says it."),
    "sft": needless("It is the method without rl."),
}


def _kind(value: Any, giving: Giving) -> Answer:
    return _KINDS.get(value) or unsupported(f"Axolotl has no {value}.")


def _template(value: Any, giving: Giving) -> Answer:
    if value is None:
        return needless("The tokenizer's own is taken by itself.")
    if value in ("chatml", "llama3"):
        return mapped({"chat_template": value})
    if str(value).lower().endswith((".jinja", ".j2")):
        return mapped({"chat_template": "jinja", "chat_template_jinja": giving.place(value)})
    return unsupported("Axolotl has no template of that name: write it into a Jinja file.")


def _experts(value: Any, giving: Giving) -> Answer:
    if giving.config.model.quantization == "none":
        return needless("Weights stay as they are by themselves.")
    return mapped({"quantize_moe_experts": value})


def _adapter(value: Any, giving: Giving) -> Answer:
    if value == "none":
        return needless("All weights are trained without an adapter.")
    return mapped({"adapter": "qlora" if giving.config.model.quantization in ("nf4", "fp4") else "lora"})


def _embedding_rate(value: Any, giving: Giving) -> Answer:
    ratio = getattr(giving.config.adapter, "loraplus_lr_ratio", None)
    return needless("It counts with LoRA+.") if ratio is None else mapped({"loraplus_lr_embedding": value})


def _targets(value: Any, giving: Giving) -> Answer:
    return mapped({"lora_target_linear": True} if value == "all-linear" else {"lora_target_modules": value})


def _beta(value: Any, giving: Giving) -> Answer:
    kind = giving.config.method.kind
    return mapped({"orpo_alpha" if kind == "orpo" else "trl.beta" if kind in ("grpo", "gdpo") else "rl_beta": value})


def _loss(value: Any, giving: Giving) -> Answer:
    kind = giving.config.method.kind
    if kind in ("grpo", "gdpo"):
        return mapped({"trl.loss_type": value})
    if value in ("sigmoid", "kto"):
        return needless("It is the loss by itself.")
    return mapped({"dpo_loss_type": [value]}) if kind == "dpo" else unsupported("Axolotl has KTO's own loss alone.")


def _smoothing(value: Any, giving: Giving) -> Answer:
    if giving.config.method.kind == "dpo":
        return mapped({"dpo_label_smoothing": value})
    return unsupported("Axolotl smooths the labels of pairs alone.")


def _scaled(value: Any, giving: Giving) -> Answer:
    if value == "batch":
        return unsupported("Axolotl scales by each group or not at all.")
    return mapped({"trl.scale_rewards": value == "group"})


def _rewards(value: Any, giving: Giving) -> Answer:
    specs, problem = rewards(value, giving)
    names = [module_of(spec, giving) if spec.kind == "function" else None for spec in specs]
    if problem or not all(names):
        return unsupported(problem or "Axolotl takes functions of modules in the folder where it is started.")
    weights = [spec.weight for spec in specs]
    more = {"trl.reward_weights": weights} if set(weights) != {1.0} else {}
    return mapped({"trl.reward_funcs": names, **more})


# Rows


def _sources(name: str) -> Meaning:
    def means(value: Any, giving: Giving) -> Answer:
        if not value:
            return needless("None are named.")
        entries: list[dict[str, Any]] = []
        for source in value:
            entry = _entry(source, giving)
            if isinstance(entry, str):
                return unsupported(f"{source.path}: {entry}")
            entries.append(entry)
        words = _OF_PAIRS.get(giving.config.method.kind, _OF_PAIRS["dpo"] if giving.config.method.kind in PAIRS else "")
        return changed({name: entries}, words) if words else mapped({name: entries})

    return means


_OF_PAIRS = {
    "dpo": "Such rows must hold messages there: a list as the prompt, one message each as chosen and rejected.",
    "reward": "Axolotl reads the columns input, chosen and rejected of such rows.",
    "kto": "Axolotl reads the columns prompt, completion and label of such rows.",
}


def _type(source: DataSource, giving: Giving) -> tuple[dict[str, Any], dict[str, str], dict[str, str]] | str:
    """What says how a source's rows are read, Axolotl's name for each part, and the columns; or the reason why nothing does."""
    method, form = giving.config.method.kind, source.format
    columns = dict(source.columns)
    if method in PAIRS and form == "preference":
        if method == "reward":
            return {"type": "bradley_terry.chat_template"}, {}, columns
        names = {"prompt": "field_messages", "chosen": "field_chosen", "rejected": "field_rejected"}
        return {"type": "chat_template.default"}, names, {"prompt": "prompt", **columns}
    if method == "kto" and form == "unpaired_preference":
        template = giving.config.model.chat_template
        if template not in ("chatml", "llama3"):
            return "Axolotl writes KTO's rows with chatml or llama3: name one as model.chat_template."
        return {"type": f"{template}.ultra"}, {}, columns
    if method == "prm" and form == "stepwise_supervision":
        last = fields.method.train_on_last_step_only.value(giving.config)
        return {"type": "stepwise_supervised", **({"train_on_last_step_only": True} if last else {})}, {}, columns
    if form == "messages":
        return {"type": "chat_template"}, {"messages": "field_messages"}, columns
    if form == "text":
        return {"type": "completion"}, {"text": "field"}, columns
    return f"Axolotl has nothing that reads {form} as it is read here: bring the rows as messages."


def _entry(source: DataSource, giving: Giving) -> dict[str, Any] | str:
    """One source as Axolotl has it, or the reason why it cannot."""
    form = source.format
    if source.path.startswith("builtin/"):
        return "Its rows are built into the workbench: name a file or a data set."
    if source.weight != 1:
        return "Axolotl takes every row of a source once in an epoch: leave out its weight."
    if form is None:
        return "Axolotl needs to be told what a row holds: name its format."
    entry: dict[str, Any] = {"path": giving.place(source.path)}
    is_file = source.path.lower().endswith((".json", ".jsonl", ".csv", ".parquet", ".txt"))
    if is_file:
        entry["ds_type"] = {"jsonl": "json", "txt": "text"}.get(
            ending := source.path.lower().rpartition(".")[2], ending
        )
    split = sliced(source)
    if split is not None:
        entry["split"] = split
        if is_file and source.rows is not None:
            return "Of a file Axolotl takes all rows: leave out rows."
    elif not is_file:
        entry["split"] = "train"
    on_hub = {"name": source.subset, "revision": source.revision}
    entry |= {key: value for key, value in on_hub.items() if value is not None}
    typed = _type(source, giving)
    if isinstance(typed, str):
        return typed
    settings, names, columns = typed
    entry |= settings
    if source.chat_template:
        written = _template(source.chat_template, giving)
        if entry["type"] != "chat_template" or written.outcome != "mapped":
            return written.reason or "Axolotl takes a template of a source with messages alone."
        entry |= written.settings
    names = {**names, "tools": "field_tools", "system": "field_system"} if entry["type"] == "chat_template" else names
    for part, column in columns.items():
        if part not in names:
            return f"Axolotl has no key for the column of {part}: rename it in the file."
        entry[names[part]] = column
    if source.properties:
        entry["message_property_mappings"] = dict(source.properties)
    if source.roles:
        roles: dict[str, list[str]] = {}
        for name, role in source.roles.items():
            roles.setdefault(role, []).append(name)
        entry["roles"] = roles
    if giving.config.data.trained_turns == "flag" and form == "messages":
        entry["message_field_training"] = "train"
    return entry


def _too_long(value: Any, giving: Giving) -> Answer:
    if giving.config.method.kind == "pretrain":
        if value == "split":
            return needless("Texts of type completion are split by themselves.")
        return changed({}, "Texts of type completion are split there, whatever is said.")
    word = {"error": "raise", "drop": "drop", "truncate": "truncate"}.get(value)
    return mapped({"excess_length_strategy": word}) if word else unsupported("Axolotl splits plain text alone.")


def _side(value: Any, giving: Giving) -> Answer:
    if value == "right" or giving.config.data.excess_length != "truncate":
        return needless("Rows are cut at their end there.")
    return unsupported("Rows are cut at their end there.")


def _packing(value: Any, giving: Giving) -> Answer:
    if value and not giving.config.data.packing_cross_doc_attn_mask:
        return unsupported("Packs keep their rows apart there: set data.packing_cross_doc_attn_mask to true.")
    return mapped({"sample_packing": value})


# The optimizer and the run


def _projected(value: Any, giving: Giving) -> Answer:
    return mapped({"optim_target_modules": "all_linear" if value == "all-linear" else value})


def _warmup(value: Any, giving: Giving) -> Answer:
    if value == 0:
        return changed({"warmup_ratio": NO_WARMUP}, "0 means 3 % of all steps there; so small a share is no step.")
    if value < 1:
        return mapped({"warmup_ratio": value})
    return mapped({"warmup_steps": int(value)}) if value == int(value) else unsupported("Axolotl counts whole steps.")


def _liger(value: Any, giving: Giving) -> Answer:
    """Its plugin and the parts; one switch is for both gates."""
    if value is not True:
        return needless("It is off there by itself.")
    parts = liger_kernel.parts(giving.config)
    switches = {"liger_rms_norm": "rms_norm" in parts, "liger_rope": "rope" in parts}
    gates = {"swiglu", "geglu"} & set(parts)
    return mapped(
        {"plugins": ["axolotl.integrations.liger.LigerPlugin"], **switches, "liger_glu_activation": bool(gates)}
    )


def _trackers(value: Any, giving: Giving) -> Answer:
    return mapped({f"use_{name}": True for name in value})


def _held_out_of(value: Any, giving: Giving) -> Answer:
    size = int(value) if value >= 1 else value
    return changed({"val_set_size": size}, "As many rows there, but others: each row is drawn for itself.")


def _in_trl(name: str) -> Meaning:
    return key(f"trl.{name}")


TABLE: dict[str, Meaning] = {
    "model.name": placed("base_model"),
    "model.revision": key("revision_of_model"),
    "model.tokenizer": placed("tokenizer_config"),
    "model.chat_template": _template,
    "model.chat_template_kwargs": filled("chat_template_kwargs"),
    "model.dtype": choice(
        {
            "bfloat16": mapped({"bf16": True}),
            "float16": mapped({"bf16": False, "fp16": True}),
        },
        otherwise=mapped({"bf16": False, "float32": True}),
    ),
    "model.quantization": quantization("Axolotl", lambda value: {"bnb_config_kwargs": {"bnb_4bit_quant_type": value}} if value == "fp4" else {}),
    "model.quantize_moe_experts": _experts,
    "model.attention": attention,
    "method.kind": _kind,
    "method.beta": _beta,
    "method.loss_type": _loss,
    "method.label_smoothing": off("It is 0 by itself.", _smoothing),
    "method.reference": reference("Axolotl"),
    "method.balance_weights": off("Good and bad answers are not balanced there.", always(BALANCED)),
    "method.desirable_weight": key("kto_desirable_weight"),
    "method.undesirable_weight": key("kto_undesirable_weight"),
    "method.simpo_gamma": key("simpo_gamma"),
    "method.cpo_alpha": key("cpo_alpha"),
    "method.center_rewards_coefficient": key("center_rewards_coefficient"),
    "method.train_on_last_step_only": by_itself("Each source says it."),
    "method.reward_funcs": _rewards,
    "method.num_generations": _in_trl("num_generations"),
    "method.max_completion_length": _in_trl("max_completion_length"),
    "method.temperature": _in_trl("temperature"),
    "method.top_p": _in_trl("top_p"),
    "method.top_k": _in_trl("top_k"),
    "method.repetition_penalty": _in_trl("repetition_penalty"),
    "method.num_iterations": _in_trl("num_iterations"),
    "method.epsilon": _in_trl("epsilon"),
    "method.epsilon_high": _in_trl("epsilon_high"),
    "method.scale_rewards": _scaled,
    "method.mask_truncated_completions": _in_trl("mask_truncated_completions"),
    "method.importance_sampling_level": _in_trl("importance_sampling_level"),
    "method.reward_timeout": by_itself("Nothing bounds a reward's time there."),
    "method.skip_zero_advantage": by_itself("What it leaves out has no gradient."),
    "method.reroll_start_fraction": choice({1.0: needless("No prompt comes back.")}, otherwise=unsupported("Axolotl's GRPO without prefetching has none of it.")),
    "method.reroll_max_groups": by_itself("It counts with reroll_start_fraction."),
    "method.reroll_max_tries": by_itself("It counts with reroll_start_fraction."),
    "method.replay_buffer_size": choice({0: needless("No group is replayed.")}, otherwise=unsupported("Axolotl's GRPO without prefetching replays nothing.")),
    "method.replay_max_age": by_itself("It counts with replay_buffer_size."),
    "method.replay_recompute_logps": by_itself("It counts with replay_buffer_size."),
    "method.replay_max_weight": by_itself("It counts with replay_buffer_size."),
    "method.async_prefetch": choice({"none": needless("Nothing is made ahead.")}, otherwise=unsupported("Axolotl's needs a vLLM server beside it.")),
    **dict.fromkeys(
        (
            "method.prefetch_depth", "method.weight_sync_steps", "method.generation_timeout", "method.generation_device", "method.importance_sampling_mode",
            "method.importance_sampling_cap",
        ),
        by_itself("It counts with async_prefetch."),
    ),
    "method.off_policy_mask_threshold": off("No answer is left out.", always(unsupported("Axolotl's GRPO without prefetching has none of it."))),
    "method.rollout_groups": by_itself("It concerns what is kept to look at."),
    "adapter.kind": _adapter,
    "adapter.unfrozen_parameters": filled("unfrozen_parameters"),
    "adapter.path": placed("lora_model_dir"),
    "adapter.r": of_new_adapter(key("lora_r")),
    "adapter.lora_alpha": of_new_adapter(key("lora_alpha")),
    "adapter.lora_dropout": key("lora_dropout"),
    "adapter.target_modules": of_new_adapter(_targets),
    "adapter.target_parameters": of_new_adapter(filled("lora_target_parameters")),
    "adapter.modules_to_save": of_new_adapter(filled("lora_modules_to_save")),
    "adapter.use_rslora": of_new_adapter(key("peft_use_rslora", False)),
    "adapter.use_dora": of_new_adapter(key("peft_use_dora", False)),
    "adapter.loraplus_lr_ratio": key("loraplus_lr_ratio"),
    "adapter.loraplus_lr_embedding": _embedding_rate,
    "adapter.autocast_adapter_dtype": key("peft_autocast_adapter_dtype"),
    "data.train": _sources("datasets"),
    "data.eval": _sources("test_datasets"),
    "data.val_set_size": off("Nothing is held out of the training data.", _held_out_of),
    "data.max_length": key("sequence_len"),
    "data.excess_length": _too_long,
    "data.truncation_side": _side,
    "data.trained_turns": choice(
        {
            "assistant": needless("Assistant turns are learned by themselves."),
            "all": mapped({"train_on_inputs": True}),
            "flag": mapped({}, "message_field_training of each source says it."),
        },
        otherwise=unsupported("Axolotl has nothing that learns the last turn alone."),
    ),
    "data.packing": _packing,
    "data.packing_cross_doc_attn_mask": by_itself("Packs keep their rows apart there."),
    "data.dataset_prepared_path": by_itself("It concerns where prepared rows are kept."),
    "data.on_bad_row": by_itself("It counts where a row cannot be read."),
    "data.deduplicate": off("All rows are taken there too.", always(mapped({"dataset_exact_deduplication": True}))),
    "data.shuffle": choice(
        {True: mapped({"shuffle_merged_datasets": True})},
        otherwise=mapped({"shuffle_merged_datasets": False, "curriculum_sampling": True}),
    ),
    "optim.learning_rate": resolved_rate,
    "optim.per_device_train_batch_size": key("micro_batch_size"),
    "optim.per_device_eval_batch_size": key("eval_batch_size"),
    "optim.gradient_accumulation_steps": key("gradient_accumulation_steps"),
    "optim.num_train_epochs": key("num_epochs"),
    "optim.max_steps": key("max_steps"),
    "optim.optim": optimizer("optimizer", {"adopt": "adopt_adamw", "came": "came_pytorch"}),
    "optim.optim_args": filled("optim_args"),
    "optim.optim_target_modules": of_galore(_projected),
    "optim.lr_scheduler_type": key("lr_scheduler"),
    "optim.lr_scheduler_kwargs": filled("lr_scheduler_kwargs"),
    "optim.warmup_steps": _warmup,
    "optim.weight_decay": key("weight_decay"),
    "optim.adam_beta1": key("adam_beta1"),
    "optim.adam_beta2": key("adam_beta2"),
    "optim.adam_epsilon": key("adam_epsilon"),
    "optim.max_grad_norm": key("max_grad_norm"),
    "optim.neftune_noise_alpha": key("neftune_noise_alpha"),
    "optim.tf32": key("tf32", "auto"),
    "optim.early_stopping_patience": key("early_stopping_patience"),
    "memory.gradient_checkpointing": checkpointing,
    "memory.activation_offloading": choice(
        {
            None: needless("It is off by itself."),
            "disk": mapped({"activation_offloading": "disk"}),
        },
        otherwise=mapped({"activation_offloading": True}),
    ),
    "memory.layer_offloading": key("layer_offloading", False),
    "memory.tiled_mlp": key("tiled_mlp", False),
    "kernels.use_liger_kernel": _liger,
    "kernels.liger_kernel_config": by_itself("liger_rms_norm, liger_rope and liger_glu_activation say it."),
    "run.output_dir": key("output_dir"),
    "run.name": key("wandb_name"),
    "run.seed": key("seed"),
    "run.logging_steps": key("logging_steps"),
    "run.save_steps": save_steps("saves_per_epoch"),
    "run.saves_per_epoch": key("saves_per_epoch"),
    "run.save_total_limit": key("save_total_limit"),
    "run.eval_steps": eval_steps("evals_per_epoch", auto=changed({"eval_strategy": "epoch"}, "Ten times a run cannot be said there: each epoch ends with it.")),
    "run.report_to": off("No tracker is asked for.", _trackers),
    "run.push_to_hub": by_itself("hub_model_id says it."),
    "run.hub_model_id": key("hub_model_id"),
    "run.hub_strategy": key("hub_strategy", "every_save"),
    "run.hub_private_repo": choice({True: needless("It is private there by itself.")}, otherwise=unsupported("It is always private there.")),
    "run.hub_wait_seconds": by_itself("A run there waits for its pushes without an end."),
    "run.metric_for_best_model": key("metric_for_best_model"),
    "run.greater_is_better": key("greater_is_better"),
    "run.save_best": by_itself("It concerns which checkpoints are kept."),
    "run.evals_per_epoch": key("evals_per_epoch"),
}  # fmt: skip
