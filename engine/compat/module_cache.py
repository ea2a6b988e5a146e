"""Walks over all modules that the libraries take at each step, taken once: to say that they train, to count their weights,
to list them, to look for compiled parts, and to put checkpoints aside for a pass without gradients.

36 layers with LoRA are 3,069 modules. Turning them all to training takes 6.5 ms of the host at each batch though nothing
turns, and counting the weights for the log's `total_flos` another 7; a step of 2,048 tokens is not much longer than 200 ms.
Whoever turns one module alone is noticed, since what they all say is looked at before a walk is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.eval_frame import OptimizedModule
from transformers import PreTrainedModel

from engine.compat.instances import all_of, noted, put


def cache_traversals(model: torch.nn.Module, accelerator: Any) -> Callable[[], None]:
    """Wraps `train`, `parameters` and `num_parameters` of the model, and how `accelerator` unwraps it; returns the undo."""
    undos = [put(model, "train", _turning_what_turns(model)), put(model, "parameters", _listing_once(model))]
    if callable(count := getattr(model, "num_parameters", None)):
        undos.append(put(model, "num_parameters", _counting_once(count)))
    undos.append(put(accelerator, "unwrap_model", _unwrapping_what_is_wrapped(model, accelerator.unwrap_model)))
    return all_of(undos)


def put_checkpoints_aside(model: PreTrainedModel) -> Callable[[], None]:
    """Turning the checkpointing of this transformers model off and on again sets its layers' own flags; returns the undo.

    TRL does so around every sampling and every pass of a reference. transformers walks over all modules for it three
    times, and each turning on hooks the embeddings once more where nobody takes the hook away: a run grew slower with
    every step. Turning it on in another way than before goes through transformers, as does a model with adapters of
    transformers' own, whose hooks it does take away.
    """
    if not getattr(model, "supports_gradient_checkpointing", False) or getattr(model, "_hf_peft_config_loaded", False):
        return noted(lambda: None)
    enable = model.gradient_checkpointing_enable
    settings: list[Any] = []
    aside: list[Any] = []
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]

    def gradient_checkpointing_disable() -> None:
        on = [layer for layer in layers if layer.gradient_checkpointing]
        for layer in on:
            layer.gradient_checkpointing = False
        aside.extend(on)

    def gradient_checkpointing_enable(gradient_checkpointing_kwargs: Any = None, **more: Any) -> None:
        wanted = gradient_checkpointing_kwargs, more
        if aside and settings == [wanted]:
            for layer in aside:
                layer.gradient_checkpointing = True
        else:
            settings[:] = [wanted]
            enable(gradient_checkpointing_kwargs=gradient_checkpointing_kwargs, **more)
        aside.clear()

    return all_of(
        [
            put(model, "gradient_checkpointing_disable", gradient_checkpointing_disable),
            put(model, "gradient_checkpointing_enable", gradient_checkpointing_enable),
        ]
    )


def _turning_what_turns(model: torch.nn.Module) -> Callable[..., Any]:
    turn = model.train
    modules: list[torch.nn.Module] = []

    def train(mode: bool = True) -> Any:
        if not modules or any(module.training is not mode for module in modules):
            turn(mode)
            modules[:] = model.modules()
        return model

    return train


def _listing_once(model: torch.nn.Module) -> Callable[..., Any]:
    """Listed anew where the first weight is another one, or the first that is trained: a model is sharded or loaded anew as a
    whole, but for parts that see and do not learn, which stay as they are."""
    walk = model.parameters
    held: list[torch.nn.Parameter] = []
    trained: list[tuple[dict[str, torch.nn.Parameter | None], str, torch.nn.Parameter]] = []

    def parameters(recurse: bool = True) -> Any:
        if not recurse:
            return walk(recurse=False)
        if not held or held[0] is not next(walk()) or any(own.get(name) is not weight for own, name, weight in trained):
            held[:] = walk()
            trained[:] = _first_trained(model)
        return iter(held)

    return parameters


def _first_trained(
    model: torch.nn.Module,
) -> list[tuple[dict[str, torch.nn.Parameter | None], str, torch.nn.Parameter]]:
    """The first trained weight with where its module keeps it; empty where none is trained."""
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None and weight.requires_grad:
                return [(module._parameters, name, weight)]
    return []


def _unwrapping_what_is_wrapped(model: torch.nn.Module, unwrap: Callable[..., Any]) -> Callable[..., Any]:
    def unwrap_model(given: Any, *args: Any, **kwargs: Any) -> Any:
        bare = given is model and not args and not kwargs and not isinstance(model, OptimizedModule)
        return given if bare else unwrap(given, *args, **kwargs)

    return unwrap_model


def _counting_once(count: Callable[..., int]) -> Callable[..., int]:
    counted: dict[bool, int] = {}

    def num_parameters(only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        if only_trainable:  # which may change
            return count(only_trainable=True, exclude_embeddings=exclude_embeddings)
        if exclude_embeddings not in counted:
            counted[exclude_embeddings] = count(exclude_embeddings=exclude_embeddings)
        return counted[exclude_embeddings]

    return num_parameters
