"""From our sections to the arguments that every transformers trainer shares: one pure function."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from accelerate import ParallelismConfig

from engine.config.optim import Optim
from engine.config.optimizers import BUILT_HERE
from engine.config.run import TRACKERS, Run
from engine.config.tree import RunConfig
from engine.run.hang import TORCH_SECONDS


def shared_arguments(config: RunConfig, run_folder: str | Path) -> dict[str, Any]:
    """Keyword arguments for TrainingArguments and its subclasses. `config` is resolved: no `auto` is left in it.

    Weights are trained in `model.dtype` as it stands; only float16 runs under autocast, with a gradient scaler, since
    float16 gradients underflow. Saving is ours (`engine.trainers.saving`), so transformers never rotates checkpoints.
    """
    optim, run = config.optim, config.run
    return {
        "output_dir": str(Path(run_folder) / "checkpoints"),
        "per_device_train_batch_size": optim.per_device_train_batch_size,
        "per_device_eval_batch_size": optim.per_device_eval_batch_size or optim.per_device_train_batch_size,
        "gradient_accumulation_steps": optim.gradient_accumulation_steps,
        "num_train_epochs": optim.num_train_epochs,
        "max_steps": optim.max_steps or -1,
        **_optimizer(optim),
        "bf16": False,
        "fp16": config.model.dtype == "float16" and torch.cuda.is_available(),
        "tf32": optim.tf32 if torch.cuda.is_available() else None,
        "use_cpu": not torch.cuda.is_available(),
        "gradient_checkpointing": checkpointing(config),
        "gradient_checkpointing_kwargs": {"use_reentrant": False} if checkpointing(config) else None,
        "seed": run.seed,
        "data_seed": run.seed,
        "full_determinism": run.full_determinism,
        # A stream goes to its place by itself; transformers would read up to it.
        "ignore_data_skip": config.data.ignore_data_skip or config.data.streaming,
        "train_sampling_strategy": "random" if config.data.shuffle else "sequential",
        "logging_steps": run.logging_steps,
        "logging_first_step": True,
        # A NaN must be seen: the filter would print a loss of 0.0 in its place.
        "logging_nan_inf_filter": False,
        "save_strategy": "steps",
        "save_steps": run.save_steps,
        "save_total_limit": None,
        "eval_strategy": "steps" if config.data.evaluates else "no",
        "eval_steps": run.eval_steps if config.data.evaluates else None,
        "prediction_loss_only": True,
        "remove_unused_columns": False,
        # A batch goes to the card while that still computes the step before, from pinned memory.
        "accelerator_config": {"non_blocking": torch.cuda.is_available()},
        "dataloader_num_workers": (workers := config.data.dataloader_num_workers),
        "dataloader_prefetch_factor": config.data.dataloader_prefetch_factor if workers else None,
        # Processes that stay would draw no seed as an epoch or a measuring begins, as a resumed run or one without them does.
        "dataloader_persistent_workers": False,
        "disable_tqdm": True,
        "report_to": [TRACKERS[name] for name in run.report_to] or "none",
        **_named(run, Path(run_folder)),
        "push_to_hub": False,
        # The supervisor, which names the rank that is waited for, comes before torch, which ends those that wait.
        "ddp_timeout": config.distributed.ddp_timeout + TORCH_SECONDS,
        **sharding(config),
    }


def _optimizer(optim: Optim) -> dict[str, Any]:
    """What builds the optimizer and its schedule."""
    # Those of ours are built by `engine.trainers.optimizers`; transformers does not know all their names.
    ours = optim.optim in BUILT_HERE
    return {
        "learning_rate": optim.learning_rate,
        "lr_scheduler_type": optim.lr_scheduler_type,
        "lr_scheduler_kwargs": dict(optim.lr_scheduler_kwargs) or None,
        "warmup_steps": optim.warmup_steps,
        "weight_decay": optim.weight_decay,
        "adam_beta1": optim.adam_beta1,
        "adam_beta2": optim.adam_beta2,
        "adam_epsilon": optim.adam_epsilon,
        "max_grad_norm": optim.max_grad_norm,
        "neftune_noise_alpha": optim.neftune_noise_alpha,
        "optim": "adamw_torch" if ours else optim.optim,
        "optim_args": None if ours else ",".join(f"{key}={value}" for key, value in optim.optim_args.items()) or None,
    }


def _named(run: Run, folder: Path) -> dict[str, Any]:
    """What MLflow, trackio and Comet call the run; others have it from the environment."""
    if not {"mlflow", "trackio", "comet"} & set(run.report_to):
        return {}
    return {"run_name": folder.name, "project": "workbench"}


def sharding(config: RunConfig) -> dict[str, Any]:
    """Arguments by which accelerate shards the model with FSDP2; none where each process holds all of it."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if config.distributed.strategy != "fsdp2" or processes == 1:
        return {}
    own = {"version": 2, "reshard_after_forward": config.distributed.reshard_after_forward is not False}
    # The layers of the model are what is put together at once; checkpoints are ours.
    shared: dict[str, Any] = {"fsdp": True, "fsdp_config": {**own, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}
    if config.distributed.cpu_offload:
        shared["fsdp_config"]["cpu_offload"] = True
        # Gradients are measured where they lie, in main memory.
        shared["ddp_backend"] = "cuda:nccl,cpu:gloo"
    if (replicas := config.distributed.dp_replicate_size) == 1:
        return shared
    sizes = ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=processes // replicas)
    return {**shared, "parallelism_config": sizes}


def checkpointing(config: RunConfig) -> bool:
    """Whether layers are computed again in the backward pass."""
    return config.memory.gradient_checkpointing in (True, "selective", "medium", "full")
