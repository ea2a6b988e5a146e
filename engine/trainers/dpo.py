"""Direct preference optimization through TRL's DPOTrainer (arXiv:2305.18290), on pairs that are already tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from trl import DPOConfig, DPOTrainer
from trl.trainer.utils import FusedCausalLMOutput

from engine.config import preference
from engine.config.kinds import reference_of
from engine.config.tree import RunConfig, method_of
from engine.errors import DataError
from engine.trainers.arguments import shared_arguments
from engine.trainers.job import Job
from engine.trainers.pairs import MEANS_OF_PAIRS
from engine.trainers.reference import ReferenceTrainer, frozen_copy
from engine.trainers.token_counts import WithRows


class Dpo(ReferenceTrainer, DPOTrainer):
    """TRL's trainer with our saving and our prepared pairs. With `dpo_norm_loss` all that its losses see are means over an
    answer's tokens, of model and reference; the likelihood beside them is of single tokens in any case."""

    means_of_rows = MEANS_OF_PAIRS
    norm_loss = False
    likelihood = 0.0
    """The weight of the likelihood where answers are compared by means; else it is TRL's own second loss."""

    def compare_means(self, likelihood: float) -> None:
        """From now on answers are compared by their mean log-probability. TRL has summed what was precomputed by then."""
        self.norm_loss, self.likelihood = True, likelihood
        self._of_tokens: list[torch.Tensor] | None = None
        for model in (self.model, self.ref_model):
            if model is not None:
                model.register_forward_hook(self._divide)

    def _divide(self, model: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        if self._of_tokens is not None and isinstance(outputs, FusedCausalLMOutput):
            assert outputs.log_probs is not None
            assert outputs.label_mask is not None
            self._of_tokens.append(outputs.log_probs)
            outputs.log_probs = outputs.log_probs / outputs.label_mask.sum(1, keepdim=True).clamp(min=1)

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any], return_outputs: bool) -> Any:
        if not self.norm_loss:
            return super()._compute_loss(model, inputs, return_outputs)
        answers = inputs["completion_mask"][:, 1:].bool()
        counts = dict(
            zip(("ref_chosen_logps", "ref_rejected_logps"), answers.sum(1).clamp(min=1).chunk(2), strict=True)
        )
        inputs = {name: value / counts[name] if name in counts else value for name, value in inputs.items()}
        self._of_tokens = []
        try:
            found = super()._compute_loss(model, inputs, return_outputs)
            ours, *_ = self._of_tokens  # of the model; the reference's follow
        finally:
            self._of_tokens = None
        loss, *rest = found if return_outputs else (found,)
        if self.likelihood:
            loss = loss - self.likelihood * ours.chunk(2)[0][answers.chunk(2)[0]].mean()
        return (loss, *rest) if return_outputs else loss

    def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
        """TRL would look for text; the rows are `prompt_ids`, `chosen_ids` and `rejected_ids` already."""
        return dataset

    def receipt_note(self) -> str:
        """What the receipt adds about the loss."""
        means = ["answers compared by means over their tokens"] if self.norm_loss else []
        weights = [self.likelihood] if self.likelihood else self.loss_weights[1:]
        likelihood = [f"likelihood of the chosen weighted {weight:g}" for weight in weights]
        return "; ".join([*means, *likelihood, self.reference_note()])


def arguments(config: RunConfig, run_folder: str | Path) -> DPOConfig:
    """Our sections as TRL's config."""
    method = method_of(config, preference.Dpo)
    loss: dict[str, Any] = {"loss_type": [method.loss_type], "label_smoothing": method.label_smoothing}
    if method.rpo_alpha and not method.dpo_norm_loss:
        loss |= {"loss_type": [method.loss_type, "sft"], "loss_weights": [1.0, method.rpo_alpha]}
    return with_loss(config, method, run_folder, **loss)


def with_loss(
    config: RunConfig, method: preference.Dpo | preference.Ipo, run_folder: str | Path, **loss: Any
) -> DPOConfig:
    """TRL's config for one of its losses on pairs, with beta and reference from the method's section."""
    return DPOConfig(
        **shared_arguments(config, run_folder),
        **loss,
        beta=method.beta,
        precompute_ref_log_probs=method.reference == "precompute",
        max_length=None,
    )


def _without_images(rows: Any) -> Any:
    """Rows for a reference that is precomputed, which TRL does for texts alone. Raises DataError where one has images."""
    if rows is None or "images" not in (rows.column_names or ()):
        return rows
    if any(rows["images"]):
        raise DataError(
            "method.reference: TRL precomputes no reference for rows with images.", "Set method.reference to auto."
        )
    return rows.remove_columns("images")


def build(job: Job, args: DPOConfig | None = None) -> Dpo:
    """The trainer, ready to `attach`. With `reference: copy` the base model is loaded a second time and frozen."""
    # Precomputed reference values are made while the trainer is built, by a forward pass that takes every key of the
    # batch for the model: row ids join only afterwards.
    more = job.trainer_arguments(ref_model=frozen_copy(job.config), data_collator=job.collator)
    if reference_of(job.config.method) == "precompute":
        more |= {name: _without_images(more[name]) for name in ("train_dataset", "eval_dataset")}
    trainer = Dpo(args=args or arguments(job.config, job.run_folder), **more)
    trainer.data_collator = WithRows(job.collator)
    trainer.settle_copy(job.config)
    method = job.config.method
    if method.kind == "dpo" and method.dpo_norm_loss:
        trainer.compare_means(method.rpo_alpha)
    return trainer
