"""Identity preference optimization (arXiv:2310.12036): DPO's trainer with the squared distance from a fixed margin.

The margin is taken of mean log-probabilities a token, as TRL does and the paper's authors confirmed to it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trl import DPOConfig

from engine.trainers import dpo


def arguments(config: Any, run_folder: str | Path) -> DPOConfig:
    """Our sections as TRL's config."""
    return dpo.with_loss(config, run_folder, loss_type=["ipo"])


def build(
    config: Any,
    run_folder: str | Path,
    model: Any,
    processing_class: Any,
    collator: Any,
    train: Any,
    eval: Any | None,
    callbacks: list[Any],
) -> dpo.Dpo:
    """The trainer, ready to `attach`, as `dpo.build` makes it."""
    args = arguments(config, run_folder)
    return dpo.build(config, run_folder, model, processing_class, collator, train, eval, callbacks, args)
