"""`memory.fp32_norms`: normalisation layers hold their weights in float32 and compute there, between layers of 16 bits.

Weights are raised before the trainer is built, so that the optimizer moves float32 numbers and a checkpoint keeps them; a
resumed run reads them back whole, and a model that is loaded anew in fewer bits rounds them. Each layer's own instance gets
a `forward` that widens what comes in, asks the class, and answers in the format that came: what lies between the norms
sees no difference. Copies of a layer (a reference, PEFT's `modules_to_save`) bind it to themselves. Refuses models whose
norms have no weights in fewer bits. On one device or with a whole copy on each; weights cut over devices are not served.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from engine.compat.instances import all_of, put
from engine.config.tree import RunConfig
from engine.errors import ModelError
from engine.features.applied import Applied
from engine.features.built import Built

FEATURE = "norms in float32"
_AROUND = "dtype_around"
_NARROW = (torch.bfloat16, torch.float16)


def prepare(config: RunConfig, built: Built) -> Callable[[], None]:
    """Raises the norms of the policy before its trainer is built; returns what gives the layers their own `forward` back.

    The weights stay float32. Raises ModelError where there is nothing to raise.
    """
    if not config.memory.fp32_norms:
        return lambda: None
    found = list(norms(built.policy))
    if not any(weight.dtype in _NARROW for norm in found for weight in norm.parameters()):
        what = "are float32 already" if found else "were not found: it has none with weights of their own"
        raise ModelError(f"memory.fp32_norms: the model's normalisation layers {what}.", "Leave it out.")
    return all_of([_raise(norm) for norm in found])


def apply(config: RunConfig, built: Built) -> Applied | None:
    """What is in force on every model of the trainer; a reference copy is raised here, and what a trainer has rounded."""
    if not config.memory.fp32_norms:
        return None
    found = list({id(norm): norm for model in built.models() for norm in norms(model)}.values())
    undo = all_of([_raise(norm) for norm in found])
    weights = [weight for norm in found for weight in norm.parameters()]
    trained = sum(weight.requires_grad for weight in weights)
    detail = (
        f"normalisation layers; {trained} weights trained, {len(weights) - trained} frozen; "
        f"{2 * sum(weight.numel() for weight in weights):,} bytes more; answers in the format that comes in"
    )
    return Applied(FEATURE, True, "float32", len(found), detail, undo)


def norms(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Every normalisation layer with weights of its own: by its class's name, as each model of transformers has its own."""
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        named = "norm" in type(module).__name__.lower()
        if named and own and all(weight.dim() == 1 and weight.is_floating_point() for weight in own):
            yield module


def dtype_around(norm: Any) -> torch.dtype:
    """The format of what comes into a norm: its weight's, or the one that its weight had before it was raised."""
    found: torch.dtype = getattr(norm, _AROUND, norm.weight.dtype)
    return found


def _raise(norm: Any) -> Callable[[], None]:
    weights = list(norm.parameters(recurse=False))
    around = next((weight.dtype for weight in weights if weight.dtype in _NARROW), None)
    if around is not None:
        setattr(norm, _AROUND, around)
    for weight in weights:
        if weight.dtype in _NARROW:
            weight.data = weight.data.float()

    def lower() -> None:
        vars(norm).pop("forward", None)

    # A copy brings the forward of what it was copied from.
    return lower if "forward" in vars(norm) else put(norm, "forward", types.MethodType(_in_float32, norm))


def _in_float32(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The class's own answer to float32, in the format of what came in."""
    came = next(each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor))
    wide = type(self).forward(self, *map(_widened, args), **{name: _widened(value) for name, value in kwargs.items()})
    answer: torch.Tensor = wide.to(came.dtype)
    return answer


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
