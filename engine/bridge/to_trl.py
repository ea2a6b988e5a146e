"""Our settings as the keys of `trl sft|dpo|kto|reward|grpo --config FILE`: the inverse of `engine.bridge.trl`."""

from __future__ import annotations

from typing import Any

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
from engine.config.run import TRACKERS
from engine.config.tree import fields

_READERS = {"json": "json", "jsonl": "json", "csv": "csv", "parquet": "parquet", "txt": "text"}
# method -> formats whose rows TRL knows by the names of their columns
_FORMATS = {
    "sft": ("messages", "prompt_completion"),
    "pretrain": ("text",),
    "dpo": ("preference",),
    "ipo": ("preference",),
    "reward": ("preference",),
    "kto": ("unpaired_preference",),
    "grpo": ("prompts",),
    "gdpo": ("prompts",),
}
COMMANDS = {
    "sft": "sft",
    "pretrain": "sft",
    "dpo": "dpo",
    "ipo": "dpo",
    "kto": "kto",
    "reward": "reward",
    "grpo": "grpo",
    "gdpo": "grpo",
}
"""The command of TRL for each method that it has one for."""


def _trackers(value: Any, giving: Giving) -> Answer:
    return mapped({"report_to": [TRACKERS[name] for name in value]})


def _kind(value: Any, giving: Giving) -> Answer:
    if value not in COMMANDS:
        return unsupported(f"TRL has no command for {value}: it has {', '.join(sorted(set(COMMANDS.values())))}.")
    more: dict[str, Any] = {}
    if value == "ipo":
        more = {"loss_type": ["ipo"]}
    elif value == "gdpo":
        more = {"multi_objective_aggregation": "normalize_then_sum"}
    return mapped(more, f"`trl {COMMANDS[value]} --config FILE` trains it.")


def _experts(value: Any, giving: Giving) -> Answer:
    if giving.config.model.quantization == "none":
        return needless("Weights stay as they are by themselves.")
    words = "TRL leaves the experts of a mixture in 16 bits; other models have none."
    return changed({}, words) if value else needless(words)


def _template(value: Any, giving: Giving) -> Answer:
    if value is None:
        return needless("The tokenizer's own is taken by itself.")
    if str(value).lower().endswith((".jinja", ".j2")) and giving.config.method.kind in ("sft", "reward"):
        return mapped({"chat_template_path": giving.place(value)})
    return unsupported("TRL takes a Jinja file, for sft and reward alone.")


def _template_values(value: Any, giving: Giving) -> Answer:
    if giving.config.method.kind in ("grpo", "gdpo"):
        return mapped({"chat_template_kwargs": value})
    return unsupported("TRL takes values for the template from a column of the rows.")


def _autocast(value: Any, giving: Giving) -> Answer:
    there = giving.config.model.quantization == "none"
    if value == there:
        return needless("It is so there by itself.")
    words = "An adapter is held in float32 there, but beside quantized weights, where it is bfloat16."
    return changed({}, words)


def _targets(value: Any, giving: Giving) -> Answer:
    if isinstance(value, list) and not value:
        return unsupported("TRL then takes PEFT's own layers: name modules too.")
    if isinstance(value, list) and len(value) == 1:
        return unsupported("TRL reads one name as a pattern of whole names: write a pattern, or two names.")
    return mapped({"lora_target_modules": value})


def _loss(value: Any, giving: Giving) -> Answer:
    kind = giving.config.method.kind
    if kind != "dpo":
        return mapped({"loss_type": value})
    alpha = fields.method.rpo_alpha.value(giving.config)
    if alpha and value != "sigmoid":
        return unsupported("With method.rpo_alpha the loss must be sigmoid there.")
    if alpha:
        return mapped({"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, alpha]})
    return mapped({"loss_type": [value]})


def _smoothing(value: Any, giving: Giving) -> Answer:
    return mapped({"label_smoothing" if giving.config.method.kind == "dpo" else "label_smoothing_factor": value})


def _rewards(value: Any, giving: Giving) -> Answer:
    specs, problem = rewards(value, giving)
    if problem:
        return unsupported(problem)
    models = [spec for spec in specs if spec.kind == "model"]
    if len(models) > 1 or (models and specs[0].kind != "model"):
        return unsupported("TRL takes one reward model, before the functions.")
    names = [module_of(spec, giving) for spec in specs if spec.kind == "function"]
    if not all(names):
        return unsupported("TRL takes functions of modules in the folder where it is started.")
    settings: dict[str, Any] = {"reward_funcs": names} if names else {}
    if models:
        settings["reward_model_name_or_path"] = giving.place(models[0].argument)
    weights = [spec.weight for spec in specs]
    return mapped({**settings, **({"reward_weights": weights} if set(weights) != {1.0} else {})})


def _sources(value: Any, giving: Giving) -> Answer:
    if not value:
        return needless("None are named.")
    wanted = _FORMATS.get(giving.config.method.kind, ())
    for source in value:
        problem = _problem(source, wanted, giving)
        if problem:
            return unsupported(f"{source.path}: {problem}")
    settings: dict[str, Any] = {}
    plain = len(value) == 1 and _reader(value[0]) is None and value[0].rows is None
    if plain:
        settings["dataset_name"] = giving.place(value[0].path)
        if value[0].split is not None:
            settings["dataset_train_split"] = value[0].split
        if value[0].subset is not None:
            settings["dataset_config"] = value[0].subset
    else:
        settings["datasets"] = [_entry(source, giving) for source in value]
    if giving.config.method.kind == "pretrain":
        settings["dataset_text_field"] = value[0].columns.get("text", "text")
    return changed(settings, "TRL tells by the names of the columns what a row holds, and is not told.")


def _problem(source: DataSource, wanted: tuple[str, ...], giving: Giving) -> str:
    """Why a source cannot be said; empty where it can."""
    if source.path.startswith("builtin/"):
        return "Its rows are built into the workbench: name a file or a data set."
    if source.format is not None and source.format not in wanted:
        return f"TRL has nothing that reads {source.format} as it is read here."
    if source.format is None and giving.config.method.kind in ("sft", "pretrain"):
        return "What is learned of a row depends on what it holds: name its format."
    named = {part for part in source.columns if part != "text" or giving.config.method.kind != "pretrain"}
    if source.revision is not None:
        return "TRL takes a data set at its main branch: leave out its revision."
    if source.chat_template:
        return "TRL writes the rows of all sources in one chat template: name it as model.chat_template."
    if named or source.properties or source.roles:
        return "TRL takes columns, keys and roles by their own names: rename them in the rows."
    return "TRL takes every row of a source once in an epoch: leave out its weight." if source.weight != 1 else ""


def _reader(source: DataSource) -> str | None:
    return _READERS.get(source.path.lower().rpartition(".")[2])


def _entry(source: DataSource, giving: Giving) -> dict[str, Any]:
    reader, split = _reader(source), sliced(source)
    place = giving.place(source.path)
    named = {"path": reader, "data_files": place} if reader else {"path": place}
    said = {"name": source.subset, "split": split}
    return named | {key: value for key, value in said.items() if value is not None}


def _held_out(value: Any, giving: Giving) -> Answer:
    if not value:
        return needless("None are named.")
    train = giving.config.data.train
    fits = (
        len(value) == 1
        and len(train) == 1
        and value[0].split is not None
        and all(getattr(value[0], name) == getattr(train[0], name) for name in ("path", "subset", "revision"))
    )
    if not fits or _reader(train[0]) is not None or value[0].rows is not None:
        return unsupported("TRL takes held-out rows from another split of the one data set that is trained on.")
    return mapped({"dataset_test_split": value[0].split, "eval_strategy": "steps"})


def _too_long(value: Any, giving: Giving) -> Answer:
    kind, data = giving.config.method.kind, giving.config.data
    if kind in ("grpo", "gdpo"):
        return (
            changed({}, "Prompts are not bounded there.")
            if value != "error"
            else needless("Prompts are not bounded there.")
        )
    if value == "truncate":
        return mapped({"truncation_mode": "keep_end" if data.truncation_side == "left" else "keep_start"})
    if value == "split" and kind == "pretrain" and data.packing:
        return mapped({"packing_strategy": "bfd_split"})
    if value == "error":
        return changed({}, "Longer rows are cut there; a run that works here has none.")
    return unsupported("Longer rows are cut there: take error or truncate.")


def _length(value: Any, giving: Giving) -> Answer:
    if giving.config.method.kind in ("grpo", "gdpo"):
        return changed({}, "Prompts are not bounded there.")
    return mapped({"max_length": value})


def _turns(value: Any, giving: Giving) -> Answer:
    if giving.config.method.kind != "sft":
        return needless("It counts with sft.")
    formats = {source.format for source in giving.config.data.train}
    if len(formats) > 1:
        return unsupported("Sources of several formats cannot be said together there.")
    if value not in ("assistant", "all"):
        return unsupported("TRL learns every assistant turn, or all turns.")
    name = "completion_only_loss" if formats == {"prompt_completion"} else "assistant_only_loss"
    more = {"completion_only_loss": False} if value == "all" else {}
    return mapped({name: value == "assistant", **more})


def _packing(value: Any, giving: Giving) -> Answer:
    if giving.config.method.kind not in ("sft", "pretrain"):
        return needless("It counts with sft.")
    if value and not giving.config.data.packing_cross_doc_attn_mask:
        return unsupported("Packs keep their rows apart there: set data.packing_cross_doc_attn_mask to true.")
    return mapped({"packing": value})


def _shuffled(value: Any, giving: Giving) -> Answer:
    kind = giving.config.method.kind
    if kind in ("grpo", "gdpo"):
        return mapped({"shuffle_dataset": value})
    return mapped({"train_sampling_strategy": "random" if value else "sequential"})


def _optim_args(value: Any, giving: Giving) -> Answer:
    return mapped({"optim_args": ",".join(f"{name}={item}" for name, item in value.items())})


def _of_an_epoch(name: str) -> Meaning:
    """As the share of all steps that TRL takes, where epochs say how long a run is."""

    def means(value: Any, giving: Giving) -> Answer:
        optim = giving.config.optim
        if value is None:
            return needless("Steps say it.")
        if optim.max_steps is not None:
            return unsupported("TRL counts steps, and how many an epoch has is not known before the run.")
        return mapped({name: 1 / (value * optim.num_train_epochs)})

    return means


TABLE: dict[str, Meaning] = {
    "model.name": placed("model_name_or_path"),
    "model.revision": key("model_revision"),
    "model.chat_template": _template,
    "model.chat_template_kwargs": off("It is empty.", _template_values),
    "model.dtype": choice(
        {
            "bfloat16": mapped({"dtype": "bfloat16", "bf16": True}),
            "float16": mapped({"dtype": "float16", "bf16": False, "fp16": True}),
        },
        otherwise=mapped({"dtype": "float32", "bf16": False}),
    ),
    "model.quantization": quantization("TRL's command", lambda value: {"bnb_4bit_quant_type": value, "use_bnb_nested_quant": True}),
    "model.quantize_moe_experts": _experts,
    "model.attention": attention,
    "method.kind": _kind,
    "method.beta": key("beta"),
    "method.loss_type": _loss,
    "method.label_smoothing": off("It is 0 by itself.", _smoothing),
    "method.rpo_alpha": by_itself("loss_weights says it."),
    "method.reference": reference("TRL"),
    "method.balance_weights": off("Good and bad answers are not balanced there.", always(BALANCED)),
    "method.desirable_weight": key("desirable_weight"),
    "method.undesirable_weight": key("undesirable_weight"),
    "method.center_rewards_coefficient": key("center_rewards_coefficient"),
    "method.reward_funcs": _rewards,
    **{
        f"method.{name}": key(name)
        for name in (
            "num_generations", "max_completion_length", "temperature", "top_p", "top_k", "repetition_penalty",
            "num_iterations", "steps_per_generation", "epsilon", "epsilon_high", "scale_rewards",
            "mask_truncated_completions", "importance_sampling_level", "off_policy_mask_threshold",
        )
    },
    "method.reward_timeout": by_itself("Nothing bounds a reward's time there."),
    "method.skip_zero_advantage": by_itself("What it leaves out has no gradient."),
    "method.reroll_start_fraction": choice({1.0: needless("No prompt comes back.")}, otherwise=unsupported("TRL does not ask failed prompts again.")),
    "method.reroll_max_groups": by_itself("It counts with reroll_start_fraction."),
    "method.reroll_max_tries": by_itself("It counts with reroll_start_fraction."),
    "method.replay_buffer_size": choice({0: needless("No group is replayed.")}, otherwise=unsupported("TRL replays nothing.")),
    "method.replay_max_age": by_itself("It counts with replay_buffer_size."),
    "method.replay_recompute_logps": by_itself("It counts with replay_buffer_size."),
    "method.replay_max_weight": by_itself("It counts with replay_buffer_size."),
    "method.async_prefetch": choice({"none": needless("Nothing is made ahead.")}, otherwise=unsupported("TRL's asynchronous GRPO is a trainer of its own, beside a vLLM server.")),
    **dict.fromkeys(
        (
            "method.prefetch_depth", "method.weight_sync_steps", "method.generation_timeout", "method.generation_device", "method.importance_sampling_mode",
            "method.importance_sampling_cap",
        ),
        by_itself("It counts with async_prefetch."),
    ),
    "method.rollout_groups": by_itself("It concerns what is kept to look at."),
    "adapter.kind": choice(
        {"none": needless("All weights are trained without an adapter.")}, otherwise=mapped({"use_peft": True})
    ),
    "adapter.path": off(
        "A new adapter is begun.", always(unsupported("TRL's scripts begin a new adapter: merge this one into its model first."))
    ),
    "adapter.r": key("lora_r"),
    "adapter.lora_alpha": key("lora_alpha"),
    "adapter.lora_dropout": key("lora_dropout"),
    "adapter.target_modules": _targets,
    "adapter.target_parameters": filled("lora_target_parameters"),
    "adapter.modules_to_save": filled("lora_modules_to_save"),
    "adapter.use_rslora": key("use_rslora", False),
    "adapter.use_dora": key("use_dora", False),
    "adapter.loraplus_lr_ratio": off("All learn at one rate.", always(unsupported("TRL's scripts have no LoRA+."))),
    "adapter.loraplus_lr_embedding": by_itself("It counts with LoRA+."),
    "adapter.autocast_adapter_dtype": _autocast,
    "data.train": _sources,
    "data.eval": _held_out,
    "data.val_set_size": off(
        "Nothing is held out of the training data.",
        always(unsupported("TRL takes held-out rows from another split: write them into a file of their own.")),
    ),
    "data.max_length": _length,
    "data.excess_length": _too_long,
    "data.truncation_side": by_itself("truncation_mode says it."),
    "data.trained_turns": _turns,
    "data.packing": _packing,
    "data.packing_cross_doc_attn_mask": by_itself("Packs keep their rows apart there."),
    "data.dataset_prepared_path": by_itself("It concerns where prepared rows are kept."),
    "data.on_bad_row": by_itself("It counts where a row cannot be read."),
    "data.deduplicate": off(
        "TRL takes every row too.", always(unsupported("TRL takes every row: leave equal ones out of the files."))
    ),
    "data.shuffle": _shuffled,
    "optim.learning_rate": resolved_rate,
    **{
        f"optim.{name}": key(name)
        for name in (
            "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps",
            "num_train_epochs", "max_steps", "lr_scheduler_type", "warmup_steps", "weight_decay", "adam_beta1",
            "adam_beta2", "adam_epsilon", "max_grad_norm",
        )
    },
    "optim.optim": optimizer("optim", {}),
    "optim.optim_args": off("It is empty.", _optim_args),
    "optim.optim_target_modules": of_galore(key("optim_target_modules")),
    "optim.lr_scheduler_kwargs": filled("lr_scheduler_kwargs"),
    "optim.neftune_noise_alpha": key("neftune_noise_alpha"),
    "optim.tf32": key("tf32", "auto"),
    "optim.bf16_full_eval": key("bf16_full_eval", False),
    "memory.gradient_checkpointing": checkpointing,
    "memory.activation_offloading": choice(
        {
            None: needless("It is off by itself."),
            "cpu": mapped({"activation_offloading": True}),
        },
        otherwise=changed({"activation_offloading": True}, "They move to the host's memory there."),
    ),
    "kernels.use_liger_kernel": choice(
        {True: mapped({"use_liger_kernel": True})}, otherwise=needless("It is off there by itself.")
    ),
    "kernels.liger_kernel_config": filled("liger_kernel_config"),
    "run.output_dir": key("output_dir"),
    "run.name": key("run_name"),
    "run.seed": key("seed"),
    "run.full_determinism": key("full_determinism", False),
    "run.logging_steps": key("logging_steps"),
    "run.save_steps": save_steps("run.saves_per_epoch"),
    "run.saves_per_epoch": _of_an_epoch("save_steps"),
    "run.save_total_limit": key("save_total_limit"),
    "run.eval_steps": eval_steps("run.evals_per_epoch", auto=changed({"eval_steps": 0.1}, "A tenth of all steps there.")),
    "run.report_to": off("No tracker is asked for.", _trackers),
    "run.push_to_hub": key("push_to_hub", False),
    "run.hub_model_id": key("hub_model_id"),
    "run.hub_strategy": key("hub_strategy", "every_save"),
    "run.hub_private_repo": lambda value, giving: mapped({"hub_private_repo": value}) if giving.config.run.push_to_hub else needless("Nothing is pushed."),
    "run.hub_wait_seconds": by_itself("A run there waits for its pushes without an end."),
    "run.metric_for_best_model": key("metric_for_best_model"),
    "run.greater_is_better": key("greater_is_better"),
    "run.save_best": by_itself("It concerns which checkpoints are kept."),
    "run.evals_per_epoch": _of_an_epoch("eval_steps"),
}  # fmt: skip
