"""transformers' Trainer with our saving and a method's own curves: for methods without a vocabulary head.

A subclass gives `compute_loss` as a mean over its batch, and calls `note` with the curves of the batch.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import TrainingArguments

from engine.config.kinds import MethodSection
from engine.config.tree import RunConfig
from engine.trainers.arguments import shared_arguments
from engine.trainers.job import Job
from engine.trainers.run_trainer import RunTrainer
from engine.trainers.token_counts import take_origin


class Plain(RunTrainer):
    """The trainer; `method` is the method's section."""

    # The loss is a mean over the batch, so that gradient accumulation averages it.
    loss_is_scaled_for_ga = False
    loss_by = "ours, on Trainer"
    """Whose loss it is, for the receipt."""
    method: MethodSection

    def start(self, method: MethodSection) -> None:
        """What is not a Trainer's own; `build` calls it."""
        self.method = method
        # Before transformers 5.19 this alone says that accumulation must average.
        self.model_accepts_loss_kwargs = False
        self.curves: dict[str, dict[str, list[float]]] = {"train": defaultdict(list), "eval": defaultdict(list)}

    def note(self, model: torch.nn.Module, values: dict[str, torch.Tensor]) -> None:
        """Curves of a batch: numbers that are averaged over the ranks that have them, by their rows, and until they are logged; NaN
        counts as absent. All ranks call it together, with the same names."""
        with torch.no_grad():
            stacked = torch.stack([value.float() for value in values.values()])
            known = ~stacked.isnan() * self.batch_part.weight
            sums = torch.stack([torch.where(known > 0, stacked, 0.0) * known, known])
            totals, weights = self.accelerator.reduce(sums, "sum").tolist()
        for name, total, weight in zip(values, totals, weights, strict=True):
            if weight:
                self.curves["train" if model.training else "eval"][name].append(total / weight)

    def at_evaluation(self) -> dict[str, float]:
        """Curves of all held-out rows together."""
        return {}

    def prediction_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], *_: Any, **__: Any
    ) -> tuple[Any, None, None]:
        take_origin(inputs)
        self.on_progress()
        inputs = self._prepare_inputs(inputs)
        part = self._part_of_last(self._held_out_share)
        with torch.no_grad(), self.compute_loss_context_manager(), self._with_part(part):
            return self.compute_loss(model, inputs), None, None

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        mode = "eval" if any(name.startswith("eval_") for name in logs) else "train"
        found = {name: sum(each) / len(each) for name, each in self.curves[mode].items()}
        self.curves[mode].clear()
        if mode == "eval":
            found |= self.at_evaluation()
        logs |= {name if mode == "train" else f"eval_{name}": value for name, value in found.items()}
        super().log(logs, *args, **kwargs)


Kind = TypeVar("Kind", bound=Plain)


def arguments(config: RunConfig, run_folder: str | Path) -> TrainingArguments:
    """Our sections as transformers' arguments."""
    return TrainingArguments(**shared_arguments(config, run_folder))


def build(kind: type[Kind], job: Job) -> Kind:
    """The trainer of this kind, ready to `attach`."""
    trainer = kind(args=arguments(job.config, job.run_folder), **job.trainer_arguments())
    trainer.start(job.config.method)
    return trainer
