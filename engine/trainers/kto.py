"""Kahneman-Tversky optimization through TRL's KTOTrainer (arXiv:2402.01306), on rated rows that are already tokens.

TRL pairs each prompt with its neighbour's answer once, in the order of the file, and therefore refuses any other order.
Our collator pairs them in the batch itself, so rows are shuffled like everywhere else: the sampler is set after TRL has
built the trainer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trl import KTOConfig, KTOTrainer

from engine.config import preference
from engine.config.tree import RunConfig, method_of
from engine.trainers.arguments import shared_arguments
from engine.trainers.job import Job
from engine.trainers.reference import ReferenceTrainer, frozen_copy


class Kto(ReferenceTrainer, KTOTrainer):
    """TRL's trainer with our saving and our prepared rows."""

    def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
        """TRL would look for text; the rows are `prompt_ids`, `completion_ids` and `label` already."""
        return dataset

    def receipt_note(self) -> str:
        """What the receipt adds about the loss."""
        weights = f"good answers weigh {self.desirable_weight:.4g}, bad ones {self.undesirable_weight:.4g}"
        by = ", by the first rows of the stream" if self.stream_loader else ""
        return f"{self.reference_note()}; {weights}{by}"


def arguments(config: RunConfig, run_folder: str | Path) -> KTOConfig:
    """Our sections as TRL's config."""
    method = method_of(config, preference.Kto)
    shared = shared_arguments(config, run_folder)
    return KTOConfig(
        **{**shared, "train_sampling_strategy": "sequential"},
        beta=method.beta,
        loss_type=method.loss_type,
        desirable_weight=method.desirable_weight,
        undesirable_weight=method.undesirable_weight,
        max_length=None,
    )


def balanced(good: int, bad: int) -> tuple[float, float]:
    """Factors of good and bad rows by which the rarer sort counts as much as the other in all; both at least 1."""
    return max(1.0, bad / good), max(1.0, good / bad)


def build(job: Job) -> Kto:
    """The trainer, ready to `attach`. `train` holds rows of both sorts (`engine.data.prepared_rows.Rated` sees to that)."""
    args = arguments(job.config, job.run_folder)
    if method_of(job.config, preference.Kto).balance_weights:
        good = sum(job.train["label"])
        for_good, for_bad = balanced(good, len(job.train) - good)
        args.desirable_weight *= for_good
        args.undesirable_weight *= for_bad
    trainer = Kto(args=args, **job.trainer_arguments(ref_model=frozen_copy(job.config)))
    trainer.args.train_sampling_strategy = shared_arguments(job.config, job.run_folder)["train_sampling_strategy"]
    trainer.settle_copy(job.config)
    # A batch's baseline, the mean of its KL terms, is gathered before anything else; what follows are sums.
    trainer.gathers_means = int(trainer.calculate_KL)
    return trainer
