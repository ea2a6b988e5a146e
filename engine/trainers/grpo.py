"""Group relative policy optimization through TRL's GRPOTrainer (arXiv:2402.03300), generation by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trl import GRPOConfig, GRPOTrainer

from engine.trainers.job import Job
from engine.trainers.rollouts import RolloutTrainer, built, rollout_arguments


class Grpo(RolloutTrainer, GRPOTrainer):
    """TRL's trainer with our saving, our prompts and our rewards."""


def arguments(config: Any, run_folder: str | Path) -> GRPOConfig:
    """Our sections as TRL's config."""
    return rollout_arguments(config, run_folder, **group_arguments(config), scale_rewards=config.method.scale_rewards)


def group_arguments(config: Any) -> dict[str, Any]:
    """What methods that compare the answers of a group share."""
    method = config.method
    return {
        "num_generations": method.num_generations,
        "loss_type": method.loss_type,
        "importance_sampling_level": method.importance_sampling_level,
        "mask_truncated_completions": method.mask_truncated_completions,
    }


def build(job: Job) -> Grpo:
    """The trainer, ready to `attach`. Raises WorkbenchError for a reward that fails on the first rows."""
    trainer: Grpo = built(Grpo, arguments(job.config, job.run_folder), job)
    return trainer
