"""Group reward-decoupled normalization through TRL's own aggregation (arXiv:2601.05242): each reward by itself, then summed.

TRL scales by the spread of the whole batch after summing, so its share of groups without spread says nothing here; it is
counted anew, as the share of groups in which no reward differs between answers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from trl import GRPOConfig

from engine.config import rollouts
from engine.config.tree import RunConfig, method_of
from engine.trainers.grpo import group_arguments
from engine.trainers.job import Job
from engine.trainers.replay import ReplayTrainer
from engine.trainers.rollouts import built, rollout_arguments, sampler_of
from engine.trainers.zero_advantage import without_difference


class Gdpo(ReplayTrainer):
    """TRL's trainer with our saving, our prompts and our rewards."""

    def receipt_note(self) -> str:
        """What the receipt adds about the loss."""
        return f"{super().receipt_note()}; each reward compared by itself"

    def alike(self, scores: torch.Tensor, size: int) -> torch.Tensor:
        """Of each group of `size`, whether no reward tells an answer apart. `scores` is (answers, rewards).

        After scaling by the spread of all answers such a group is as far from their mean as that is from 0: by rounding.
        """
        return without_difference(scores, size)

    def compared(self, scores: torch.Tensor) -> torch.Tensor:
        return scores * self.reward_weights.to(scores.device)

    def _with_advantages(self, output: dict[str, Any]) -> dict[str, Any]:
        size = self.num_generations if self.mode == "train" else self.num_generations_eval
        self._metrics[self.mode]["frac_reward_zero_std"][-1] = without_spread(self._scores, size)
        return super()._with_advantages(output)


def without_spread(scores: torch.Tensor, size: int) -> float:
    """The share of groups in which every reward is the same for all answers that it applies to. `scores` is (answers,
    rewards), NaN where a reward does not apply."""
    return without_difference(scores, size).float().mean().item()


def arguments(config: RunConfig, run_folder: str | Path) -> GRPOConfig:
    """Our sections as TRL's config."""
    more = {**group_arguments(method_of(config, rollouts.Gdpo)), "multi_objective_aggregation": "normalize_then_sum"}
    return rollout_arguments(config, run_folder, **more)


def build(job: Job) -> Gdpo:
    """The trainer, ready to `attach`. Raises WorkbenchError for a reward that fails on the first rows."""
    return built(Gdpo, arguments(job.config, job.run_folder), job)


def sampler(job: Job) -> Gdpo:
    """The trainer that samples for another one, and never trains."""
    return sampler_of(Gdpo, arguments(job.config, job.run_folder), job)
