"""The keys of transformers' TrainingArguments, which TRL's and LLaMA-Factory's configs share: one row a key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.bridge import sharding
from engine.bridge.keys import (
    INTERNAL,
    NO_DEFAULT,
    OFF,
    SAME_HERE,
    Answer,
    File,
    Key,
    Part,
    changed,
    choice,
    mapped,
    needless,
    nothing,
    same,
    unless,
    unless_off,
    unsupported,
    where_known,
)
from engine.config.kernels import LIGER_PARTS
from engine.config.renames import is_off, sentence_for
from engine.config.run import TRACKERS
from engine.hub import is_repository


def _steps(value: Any, file: File) -> Answer:
    """-1 means that the epochs decide."""
    if isinstance(value, int) and value < 0:
        return needless("optim.num_train_epochs decides, as there.")
    return mapped({"optim.max_steps": value})


def _warmup_ratio(value: Any, file: File) -> Answer:
    return needless("warmup_steps says it.") if file.get("warmup_steps") else mapped({"optim.warmup_steps": value})


def _optim_args(value: Any, file: File) -> Answer | list[Part]:
    pairs: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        pairs = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, str):
        from engine.config.files import parse_value

        split = [part.partition("=") for part in value.replace(" ", "").split(",") if part]
        pairs = [(key, parse_value(text)) for key, equals, text in split if equals]
    settings = {key: item for key, item in pairs}
    return mapped({"optim.optim_args": settings}) if settings else unsupported("optim.optim_args takes `key: value`.")


LIGER = (
    "Left out, kernels.torch_compile compiles layers on a card where that earns its wait, which was measured faster."
)
"""Beside Liger's kernels, which are taken where they are asked for."""


def _liger_parts(value: Any, file: File) -> Answer | list[Part]:
    """Which kernels of Liger are taken; their losses are ours."""
    if not isinstance(value, Mapping):
        return (
            needless(OFF) if is_off(value) else unsupported("kernels.liger_kernel_config takes `part: true or false`.")
        )
    return [(str(key), item, _liger_part(str(key), item)) for key, item in value.items()]


def _liger_part(key: str, value: Any) -> Answer:
    if key in LIGER_PARTS:
        return mapped({"kernels.liger_kernel_config": {key: value}})
    if is_off(value):
        return needless(OFF)
    if key in ("cross_entropy", "fused_linear_cross_entropy"):
        return changed({"kernels.use_cut_ce": True}, OWN_LOSS)
    return unsupported(f"kernels.liger_kernel_config has {', '.join(LIGER_PARTS)}.")


OWN_LOSS = "The workbench's own loss without the scores of a whole batch: the same numbers."


def _eval_strategy(value: Any, file: File) -> Answer:
    if value in ("no", False):
        return needless("Nothing is measured while data.eval names no rows.")
    if value == "steps":
        return needless("Rows of data.eval are measured every run.eval_steps steps.")
    return changed({}, "Rows of data.eval are measured every run.eval_steps steps, ten times a run by itself.")


def _save_strategy(value: Any, file: File) -> Answer:
    if value == "steps":
        return needless("A checkpoint is kept every run.save_steps steps.")
    return changed({}, "A checkpoint is kept every run.save_steps steps, and the end of a run always.")


BEST = Key(
    lambda value, file: (
        needless(OFF)
        if is_off(value)
        else changed({}, "The best checkpoint is kept and named, and so is the end of the run.")
    )
)


def steps(setting: str, default: Any = NO_DEFAULT) -> Key:
    """So many steps under our name; a share of all steps is none."""

    def means(value: Any, file: File) -> Answer:
        if isinstance(value, float) and 0 < value < 1:
            return unsupported(f"{setting} counts steps; a share of all steps is not known before the run.")
        return mapped({setting: value})

    return Key(means, default)


def _report(value: Any, file: File) -> Answer:
    named = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    if is_off(value) or named in (["none"], []):
        return needless(OFF)
    ours = {package: name for name, package in TRACKERS.items()}
    known = [ours.get(name, name) for name in named if name in {**TRACKERS, **ours}]
    others = ", ".join(str(name) for name in named if name not in {**TRACKERS, **ours})
    if not known:
        *most, last = TRACKERS
        return unsupported(f"The trackers here are {', '.join(most)} and {last}.")
    return changed({"run.report_to": known}, f"Not here: {others}.") if others else mapped({"run.report_to": known})


REPOSITORY = "run.hub_model_id takes the repository as owner/name; name it and set run.push_to_hub: true."


def _push(value: Any, file: File) -> Answer:
    if is_off(value):
        return needless(OFF)
    if not is_repository(str(file.get("hub_model_id", ""))):
        return unsupported(REPOSITORY)
    if file.get("hub_private_repo") is None:
        words = "A repository that is made is private here: run.hub_private_repo: false makes it public."
        return changed({"run.push_to_hub": True}, words)
    return mapped({"run.push_to_hub": True})


def _of_push(path: str) -> Key:
    """A setting of uploads, which counts where the file asks for them."""

    def means(value: Any, file: File) -> Answer:
        if not file.on("push_to_hub"):
            return needless("It counts with push_to_hub.")
        return mapped({path: value}) if is_repository(str(file.get("hub_model_id", ""))) else unsupported(REPOSITORY)

    return Key(means)


def tracker(name: str) -> Key:
    """A switch of its own for one tracker."""

    def means(value: Any, file: File) -> Answer:
        wanted = [tracker for tracker in TRACKERS if tracker == name or not is_off(file.mapping.get(f"use_{tracker}"))]
        return needless(OFF) if is_off(value) else mapped({"run.report_to": wanted})

    return Key(means)


def sampling(default: Any = NO_DEFAULT) -> Key:
    """The order of rows: drawn or as they stand."""
    orders = {"random": mapped({"data.shuffle": True}), "sequential": mapped({"data.shuffle": False})}
    return choice(orders, sentence_for("group_by_length"), default)


def _target(value: Any, file: File) -> Answer:
    return mapped({"optim.optim_target_modules": "all-linear" if value in ("all_linear", "all-linear") else value})


def lora_dropout(method_of: Callable[[File], str], default: Any = NO_DEFAULT) -> Key:
    """LoRA's dropout, which is off where answers are compared."""

    def means(value: Any, file: File) -> Answer:
        method = method_of(file)
        if value and method in ("dpo", "ipo", "kto", "reward"):
            words = "Answers are compared without dropout here, since its noise would count as a difference."
            return changed({"adapter.lora_dropout": 0.0}, words)
        return mapped({"adapter.lora_dropout": value})

    return Key(means, default)


def label_smoothing(method_of: Callable[[File], str]) -> Key:
    """Smoothed labels of single tokens, which methods that learn from texts have."""

    def means(value: Any, file: File) -> Answer:
        if is_off(value):
            return needless(OFF)
        if method_of(file) not in ("sft", "pretrain"):
            return needless("It counts where texts are learned.")
        return mapped({"method.label_smoothing": value})

    return Key(means)


def desirable_weight(method_of: Callable[[File], str]) -> Key:
    """KTO's weight of good answers; the tools weigh by what is written alone, the workbench also balances by itself."""

    def means(value: Any, file: File) -> Answer:
        words = "Good and bad answers are not balanced by their numbers there."
        return mapped({"method.desirable_weight": value, "method.balance_weights": False}, words)

    return Key(means, lambda file: 1.0 if method_of(file) == "kto" else NO_DEFAULT)


_LOADER = "Rows are prepared before the run and read from memory."
_DDP = "It concerns how processes exchange gradients, which is set by itself here."
_SHOWN = "`workbench watch` shows a run, and its log holds what libraries say."
_EVAL = "The loss on data.eval is measured at a steady pace; how it is gathered is no setting."
_HUB = "Checkpoints lie in the run folder."

KEYS: dict[str, Key] = {
    "output_dir": same("run.output_dir", reason="Each run gets a folder of its own in it."),
    "overwrite_output_dir": nothing("Every run has a folder of its own."),
    "do_train": unless(True, sentence_for("do_train"), "A config is always trained."),
    "do_eval": nothing(sentence_for("do_eval")),
    "do_predict": unless_off(sentence_for("do_predict")),
    "per_device_train_batch_size": same("optim.per_device_train_batch_size", default=8),
    "per_device_eval_batch_size": same("optim.per_device_eval_batch_size"),
    "gradient_accumulation_steps": same("optim.gradient_accumulation_steps", default=1),
    "num_train_epochs": same("optim.num_train_epochs", default=3.0),
    "max_steps": Key(_steps),
    "learning_rate": same("optim.learning_rate", default=5e-5),
    "lr_scheduler_type": same("optim.lr_scheduler_type"),
    "lr_scheduler_kwargs": same("optim.lr_scheduler_kwargs"),
    "warmup_steps": same("optim.warmup_steps"),
    "warmup_ratio": Key(_warmup_ratio),
    "optim": same("optim.optim"),
    "optim_args": Key(_optim_args),
    "optim_target_modules": Key(_target),
    "weight_decay": same("optim.weight_decay"),
    "adam_beta1": same("optim.adam_beta1"),
    "adam_beta2": same("optim.adam_beta2"),
    "adam_epsilon": same("optim.adam_epsilon"),
    "max_grad_norm": same("optim.max_grad_norm"),
    "label_smoothing_factor": unless_off("The loss of a token is its own cross-entropy here."),
    "average_tokens_across_devices": unless(True, "Tokens count alike over all devices here.", SAME_HERE),
    "tf32": same("optim.tf32"),
    "bf16_full_eval": same("optim.bf16_full_eval"),
    "fp16_full_eval": unless_off("optim.bf16_full_eval evaluates in bfloat16."),
    "gradient_checkpointing": same("memory.gradient_checkpointing"),
    "gradient_checkpointing_kwargs": nothing(sentence_for("gradient_checkpointing_kwargs")),
    "activation_checkpointing": same("memory.gradient_checkpointing"),
    "activation_checkpointing_kwargs": nothing(sentence_for("gradient_checkpointing_kwargs")),
    "torch_compile": same("kernels.torch_compile"),
    "torch_compile_backend": unless("inductor", "Layers are compiled by torch's inductor."),
    "torch_compile_mode": where_known(
        "kernels.torch_compile_mode",
        unless("default", "kernels.torch_compile_options takes single options of the compiler."),
    ),
    "use_liger_kernel": same("kernels.use_liger_kernel", reason=LIGER),
    "liger_kernel_config": Key(_liger_parts),
    "use_cache": nothing("Keys and values are kept where answers are sampled, and nowhere else."),
    "neftune_noise_alpha": where_known("optim.neftune_noise_alpha", unless_off()),
    "torch_empty_cache_steps": nothing("Memory is given back by itself."),
    "auto_find_batch_size": unless_off("`workbench estimate` says beforehand what fits."),
    "logging_strategy": unless("steps", "run.logging_steps counts steps."),
    "logging_steps": steps("run.logging_steps"),
    "logging_dir": nothing("Curves lie in the run folder."),
    "logging_first_step": nothing("The first step is always written down."),
    "logging_nan_inf_filter": nothing("A loss that is not finite is always seen: run.on_nan."),
    "log_on_each_node": nothing(_SHOWN),
    "log_level": nothing(_SHOWN),
    "log_level_replica": nothing(_SHOWN),
    "disable_tqdm": nothing(_SHOWN),
    "include_num_input_tokens_seen": nothing("Tokens are always counted."),
    "include_tokens_per_second": nothing("Tokens a second are always a curve."),
    "report_to": Key(_report),
    "run_name": same("run.name"),
    "project": unless_off(_HUB),
    "trackio_space_id": unless_off(),
    "trackio_bucket_id": unless_off(),
    "trackio_static_space_id": unless_off(),
    "eval_strategy": Key(_eval_strategy),
    "evaluation_strategy": Key(_eval_strategy),
    "eval_steps": steps("run.eval_steps"),
    "eval_delay": unless_off(_EVAL),
    "eval_on_start": unless_off(_EVAL),
    "prediction_loss_only": nothing(_EVAL),
    "eval_do_concat_batches": nothing(_EVAL),
    "eval_use_gather_object": nothing(_EVAL),
    "eval_accumulation_steps": nothing(_EVAL),
    "include_for_metrics": nothing(_EVAL),
    "batch_eval_metrics": nothing(_EVAL),
    "save_strategy": Key(_save_strategy),
    "save_steps": steps("run.save_steps", default=500),
    "save_total_limit": same("run.save_total_limit"),
    "save_only_model": unless_off(sentence_for("save_only_model")),
    "save_on_each_node": nothing("A run works on one machine."),
    "save_safetensors": unless(True, "Checkpoints are safetensors.", "Checkpoints are safetensors."),
    "enable_jit_checkpoint": unless_off("`workbench stop RUN --save` saves and ends a run."),
    "load_best_model_at_end": BEST,
    "metric_for_best_model": same("run.metric_for_best_model"),
    "greater_is_better": same("run.greater_is_better"),
    "resume_from_checkpoint": unless_off(sentence_for("resume_from_checkpoint")),
    "restore_callback_states_from_checkpoint": nothing("A run that goes on restores all of its state."),
    "ignore_data_skip": unless_off("A run that goes on goes on in the rows where it was."),
    "push_to_hub": Key(_push),
    "hub_token": unless_off(),
    "hub_private_repo": _of_push("run.hub_private_repo"),
    "hub_model_id": _of_push("run.hub_model_id"),
    "hub_strategy": _of_push("run.hub_strategy"),
    "hub_always_push": nothing("A checkpoint that is on its way arrives first; the newest is always sent."),
    "hub_revision": unless_off(),
    "full_determinism": same("run.full_determinism"),
    "seed": same("run.seed"),
    "data_seed": unless_off("run.seed counts for the rows too."),
    "use_cpu": unless_off("run.devices takes GPUs where there are any."),
    "no_cuda": unless_off("run.devices takes GPUs where there are any."),
    "accelerator_config": unless_off("How batches reach the devices is set by itself."),
    "dataloader_drop_last": unless_off("The last batch of an epoch is learned from too."),
    "dataloader_num_workers": same("data.dataloader_num_workers"),
    "dataloader_pin_memory": nothing(_LOADER),
    "dataloader_persistent_workers": nothing(_LOADER),
    "dataloader_prefetch_factor": nothing(_LOADER),
    "dataloader_multiprocessing_context": nothing(_LOADER),
    "dataloader_in_order": nothing(_LOADER),
    "remove_unused_columns": nothing("A row gives what its method learns from, whatever columns stand beside."),
    "label_names": nothing("What is learned from a row follows from the method."),
    "train_sampling_strategy": sampling(),
    "group_by_length": unless_off(sentence_for("group_by_length")),
    "length_column_name": nothing("It counts where rows are grouped by length."),
    "ddp_find_unused_parameters": nothing(_DDP),
    "ddp_bucket_cap_mb": nothing(_DDP),
    "ddp_broadcast_buffers": nothing(_DDP),
    "ddp_static_graph": nothing(_DDP),
    "ddp_backend": nothing(_DDP),
    "ddp_timeout": same("distributed.ddp_timeout"),
    "local_rank": nothing(INTERNAL),
    **sharding.KEYS,
    "debug": unless_off("A run's log and `workbench stack RUN` show what it does."),
    "skip_memory_metrics": nothing("Memory is always a curve."),
    "predict_with_generate": unless_off("run.prompts are answered while a run trains."),
    "generation_max_length": nothing("It counts with predict_with_generate."),
    "generation_num_beams": nothing("It counts with predict_with_generate."),
    "generation_config": nothing("It counts with predict_with_generate."),
    "sortish_sampler": unless_off(sentence_for("group_by_length")),
}
_KEPT_ALL = "There every checkpoint is kept; here the newest ones, which run.save_total_limit counts."
KEEPS_ALL = Key(
    lambda value, file: changed({}, _KEPT_ALL) if value == "all" else mapped({"run.save_total_limit": value}),
    default="all",
)
"""`save_total_limit` of tools that keep every checkpoint unless told otherwise."""
