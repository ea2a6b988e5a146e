"""What a method's trainer is built from: the one argument of every method's `build`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peft import PeftModel
from transformers import PreTrainedModel

from engine.config.tree import RunConfig
from engine.trainers.token_counts import WithRows


@dataclass(frozen=True)
class Job:
    """A run's config, no `auto` left, and what was made from it: the model with its adapter, prepared rows, the collator."""

    config: RunConfig
    run_folder: str | Path
    model: PreTrainedModel | PeftModel
    processing_class: Any
    collator: Any
    train: Any
    eval: Any | None = None
    callbacks: list[Any] = field(default_factory=list)

    def trainer_arguments(self, **own: Any) -> dict[str, Any]:
        """What every trainer of ours is given, by its argument; `own` comes on top or in its place."""
        return {
            "model": self.model,
            "data_collator": WithRows(self.collator),
            "train_dataset": self.train,
            "eval_dataset": self.eval,
            "processing_class": self.processing_class,
            "callbacks": self.callbacks,
            "optim": self.config.optim,
            "adapter": self.config.adapter,
            **own,
        }
