"""Group relative policy optimization through TRL's GRPOTrainer (arXiv:2402.03300), generation by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trl import GRPOConfig

from engine.config import rollouts
from engine.config.tree import RunConfig, method_of
from engine.trainers.job import Job
from engine.trainers.replay import ReplayTrainer
from engine.trainers.rollouts import built, rollout_arguments, sampler_of


class Grpo(ReplayTrainer):
    """TRL's trainer with our saving, our prompts and our rewards."""

    def _with_advantages(self, output: dict[str, Any]) -> dict[str, Any]:
        if self.scale_rewards == "batch":  # of whose spread alone TRL tells whether it is 0
            size = self.num_generations if self.mode == "train" else self.num_generations_eval
            share = self.alike(self._scores, size).float().mean().item()
            self._metrics[self.mode]["frac_reward_zero_std"][-1] = share
        return super()._with_advantages(output)


def arguments(config: RunConfig, run_folder: str | Path) -> GRPOConfig:
    """Our sections as TRL's config."""
    method = method_of(config, rollouts.Grpo)
    return rollout_arguments(config, run_folder, **group_arguments(method), scale_rewards=method.scale_rewards)


def group_arguments(method: rollouts.Groups) -> dict[str, Any]:
    """What methods that compare the answers of a group share."""
    return {
        "num_generations": method.num_generations,
        "loss_type": method.loss_type,
        "importance_sampling_level": method.importance_sampling_level,
        "mask_truncated_completions": method.mask_truncated_completions,
        "off_policy_mask_threshold": method.off_policy_mask_threshold,
        "vllm_importance_sampling_mode": method.importance_sampling_mode,
        "vllm_importance_sampling_clip_max": method.importance_sampling_cap,
    }


def build(job: Job) -> Grpo:
    """The trainer, ready to `attach`. Raises WorkbenchError for a reward that fails on the first rows."""
    return built(Grpo, arguments(job.config, job.run_folder), job)


def sampler(job: Job) -> Grpo:
    """The trainer that samples for another one, and never trains."""
    return sampler_of(Grpo, arguments(job.config, job.run_folder), job)
