"""Identity preference optimization (arXiv:2310.12036): DPO's trainer with the squared distance from a fixed margin.

The margin is taken of mean log-probabilities a token, as TRL does and the paper's authors confirmed to it.
"""

from __future__ import annotations

from pathlib import Path

from trl import DPOConfig

from engine.config.preference import Ipo
from engine.config.tree import RunConfig, method_of
from engine.trainers import dpo
from engine.trainers.job import Job


def arguments(config: RunConfig, run_folder: str | Path) -> DPOConfig:
    """Our sections as TRL's config."""
    return dpo.with_loss(config, method_of(config, Ipo), run_folder, loss_type=["ipo"])


def build(job: Job) -> dpo.Dpo:
    """The trainer, ready to `attach`, as `dpo.build` makes it."""
    return dpo.build(job, arguments(job.config, job.run_folder))
