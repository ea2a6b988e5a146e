"""A reward model through TRL's RewardTrainer: the log-sigmoid of the difference of two scores (arXiv:2203.02155, eq. 1).

The score is read at an answer's last token, from a head of one number. TRL adds no head of words, so there are no logits
of a vocabulary to save.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from trl import RewardConfig, RewardTrainer

from engine.config import reward_model
from engine.config.tree import RunConfig, method_of
from engine.trainers.arguments import shared_arguments
from engine.trainers.job import Job
from engine.trainers.run_trainer import RunTrainer


class Reward(RunTrainer, RewardTrainer):
    """TRL's trainer with our saving and our prepared pairs."""

    gathers_means = sys.maxsize
    means_of_rows = ("accuracy", "margin", "mean_reward")

    def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
        """TRL would join the prompt to text; the rows are `prompt_ids`, `chosen_ids` and `rejected_ids` already."""
        return dataset

    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        # The mask of the answers is for the count of tokens; a score is of the whole sequence.
        given = {name: value for name, value in inputs.items() if name != "completion_mask"}
        return super().compute_loss(model, given, *args, **kwargs)

    def receipt_note(self) -> str:
        """What the receipt tells of the loss."""
        return "Bradley-Terry; one score at the last token; no vocabulary head, so no logits of words"


def arguments(config: RunConfig, run_folder: str | Path) -> RewardConfig:
    """Our sections as TRL's config."""
    return RewardConfig(
        **shared_arguments(config, run_folder),
        center_rewards_coefficient=method_of(config, reward_model.Reward).center_rewards_coefficient,
        max_length=None,
    )


def build(job: Job) -> Reward:
    """The trainer, ready to `attach`."""
    tokenizer = getattr(job.processing_class, "tokenizer", job.processing_class)
    args = arguments(job.config, job.run_folder)
    return Reward(args=args, **job.trainer_arguments(processing_class=tokenizer))
