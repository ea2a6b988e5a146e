"""Supervised fine-tuning through TRL's SFTTrainer, on rows that are already tokens."""

from __future__ import annotations

from pathlib import Path

from trl import SFTConfig, SFTTrainer

from engine.config.tree import RunConfig
from engine.trainers.arguments import shared_arguments
from engine.trainers.context_parallel import DividesRows
from engine.trainers.job import Job
from engine.trainers.late_metrics import LateMetrics


class Sft(DividesRows, LateMetrics, SFTTrainer):
    """TRL's trainer with our saving. Its loss is the mean over trained tokens of the whole optimizer step."""


def arguments(config: RunConfig, run_folder: str | Path) -> SFTConfig:
    """Our sections as TRL's config. Rows come prepared: length, packing and masks were settled in `engine.data`."""
    return SFTConfig(
        **shared_arguments(config, run_folder),
        max_length=None,
        packing=False,
        dataset_kwargs={"skip_prepare_dataset": True},
    )


def build(job: Job) -> Sft:
    """The trainer, ready to `attach` to its run."""
    trainer = Sft(args=arguments(job.config, job.run_folder), **job.trainer_arguments())
    if (size := job.config.distributed.context_parallel_size) > 1:
        trainer.divide_rows(size)
    return trainer
