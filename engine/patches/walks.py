"""Walks over all modules that transformers takes at each step, taken once: to say that they train, to count their weights.

36 layers with LoRA are 3,069 modules. Turning them all to training takes 6.5 ms of the host at each batch though nothing
turns, and counting the weights for the log's `total_flos` another 7; a step of 2,048 tokens is not much longer than 200 ms.
Whoever turns one module alone is noticed, since what they all say is looked at before a walk is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from engine.patches.instances import all_of, put


def walk_once(trainer: Any) -> Callable[[], None]:
    """Wraps `train` and `num_parameters` of the trainer's model; returns the undo."""
    model = trainer.model
    undos = [put(model, "train", _turning_what_turns(model))]
    if hasattr(model, "num_parameters"):
        undos.append(put(model, "num_parameters", _counting_once(model.num_parameters)))
    return all_of(undos)


def _turning_what_turns(model: Any) -> Callable[..., Any]:
    turn = model.train
    modules: list[torch.nn.Module] = []

    def train(mode: bool = True) -> Any:
        if not modules or any(module.training is not mode for module in modules):
            turn(mode)
            modules[:] = model.modules()
        return model

    return train


def _counting_once(count: Callable[..., int]) -> Callable[..., int]:
    counted: dict[bool, int] = {}

    def num_parameters(only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        if only_trainable:  # which may change
            return count(only_trainable=True, exclude_embeddings=exclude_embeddings)
        if exclude_embeddings not in counted:
            counted[exclude_embeddings] = count(exclude_embeddings=exclude_embeddings)
        return counted[exclude_embeddings]

    return num_parameters
