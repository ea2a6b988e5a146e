"""Direct preference optimization through TRL's DPOTrainer (arXiv:2305.18290), on pairs that are already tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trl import DPOConfig, DPOTrainer

from engine.trainers.arguments import shared_arguments
from engine.trainers.job import Job
from engine.trainers.reference import frozen_copy, where, without_needless_copy
from engine.trainers.saving import RunTrainer, WithRows


class Dpo(RunTrainer, DPOTrainer):
    """TRL's trainer with our saving and our prepared pairs."""

    def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
        """TRL would look for text; the rows are `prompt_ids`, `chosen_ids` and `rejected_ids` already."""
        return dataset

    def told(self) -> str:
        """What the receipt adds about the loss."""
        likelihood = [f"likelihood of the chosen weighted {weight:g}" for weight in self.loss_weights[1:]]
        return "; ".join([*likelihood, where(self)])


def arguments(config: Any, run_folder: str | Path) -> DPOConfig:
    """Our sections as TRL's config."""
    method = config.method
    loss: dict[str, Any] = {"loss_type": [method.loss_type], "label_smoothing": method.label_smoothing}
    if method.rpo_alpha:
        loss |= {"loss_type": [method.loss_type, "sft"], "loss_weights": [1.0, method.rpo_alpha]}
    return with_loss(config, run_folder, **loss)


def with_loss(config: Any, run_folder: str | Path, **loss: Any) -> DPOConfig:
    """TRL's config for one of its losses on pairs, with beta and reference from the method's section."""
    return DPOConfig(
        **shared_arguments(config, run_folder),
        **loss,
        beta=config.method.beta,
        precompute_ref_log_probs=config.method.reference == "precompute",
        max_length=None,
    )


def build(job: Job, args: DPOConfig | None = None) -> Dpo:
    """The trainer, ready to `attach`. With `reference: copy` the base model is loaded a second time and frozen."""
    # Precomputed reference values are made while the trainer is built, by a forward pass that takes every key of the
    # batch for the model: row ids join only afterwards.
    given = job.given(ref_model=frozen_copy(job.config), data_collator=job.collator)
    trainer = Dpo(args=args or arguments(job.config, job.run_folder), **given)
    trainer.data_collator = WithRows(job.collator)
    without_needless_copy(trainer)
    return trainer
