"""Adapters of a compiled layer: their low-rank products are taken together and added inside those of the base weights.

Queries, keys and values read the same input, and so do gate and up. Their first matrices are multiplied with it at once,
scaled while they are small, and the backward pass then has one product in place of each three as well: an 8B layer reads
its input once for them and not seven times. A module that holds such projections gets a `forward` on its instance, which
runs the class's own code over a view of the module whose projections answer from what was computed. Serves PEFT's plain
LoRA with one active adapter; whatever else (dropout, DoRA, a bias of its own, other number formats) PEFT computes itself.
`engine.features.fused_lora.apply` puts the same views into layers that are not compiled, with a backward pass of its own.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear as LoraLinear

from engine.compat.instances import all_of, put
from engine.features.compile.gate import Gate

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Projections that read one input, by the names under which models hold them."""
ALONE = ("o_proj", "down_proj")
"""Projections beside them that read another."""


Compute = Callable[[torch.Tensor, list[Any]], list[torch.Tensor | None]]
"""What projections answer to an input x [..., in]; None where the projection is to be asked itself."""


def group(layers: list[torch.nn.Module], gate: Gate | None = None) -> tuple[int, Callable[[], None]]:
    """Gives every module in `layers` that holds a group of adapted projections its forward; how many, and the undo.

    `gate` switches the adapters off by its factor.
    """
    compute = functools.partial(_of_plain, gate)
    found = [
        (module, names) for module, names in grouped(layers) if any(plain(module._modules[name]) for name in names)
    ]
    undos = [
        see(module, names, [name for name in ALONE if name in module._modules], compute) for module, names in found
    ]
    return len(found), all_of(undos)


def grouped(layers: list[torch.nn.Module]) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """Every module in `layers` that holds projections of one input and computes as its class does, with their names."""
    for layer in layers:
        for module in layer.modules():
            for names in GROUPS:
                if all(name in module._modules for name in names) and isinstance(module.forward, types.MethodType):
                    yield module, names


def see(module: Any, names: tuple[str, ...], alone: list[str], compute: Compute) -> Callable[[], None]:
    """Has the module run its own code over a view in which these projections are computed by `compute`; returns the undo."""
    theirs: Any = module.forward
    return put(module, "forward", types.MethodType(_over_view(theirs.__func__, names, alone, compute), module))


def plain(layer: Any) -> bool:
    """Whether a projection is LoRA as the paper has it, with nothing that PEFT would do beside the two products."""
    if not isinstance(layer, LoraLinear) or layer.disable_adapters or layer.merged or len(layer.active_adapters) != 1:
        return False
    name = layer.active_adapters[0]
    return (
        name in layer.lora_A
        and name not in layer.lora_variant
        and not layer.lora_bias[name]
        and isinstance(layer.lora_dropout[name], torch.nn.Identity)
    )


def _over_view(
    forward: Callable[..., Any], names: tuple[str, ...], alone: list[str], compute: Compute
) -> Callable[..., Any]:
    def over_view(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        layers = [getattr(self, name) for name in names]
        answers: dict[str, Any] = {name: _Alone(getattr(self, name), compute) for name in alone}
        for name, layer, output in zip(names, layers, compute(hidden_states, layers), strict=True):
            if output is not None:
                answers[name] = _Known(layer, hidden_states, output)
        return forward(View(self, answers), hidden_states, *args, **kwargs)

    return over_view


def serves(layer: Any, x: torch.Tensor | None = None) -> bool:
    """Whether a projection is plain LoRA, in the number format of `x` where that is known."""
    return plain(layer) and (x is None or layer.lora_A[layer.active_adapters[0]].weight.dtype == x.dtype)


def _of_plain(gate: Gate | None, x: torch.Tensor, layers: list[Any]) -> list[torch.Tensor | None]:
    served = [serves(layer, x) for layer in layers]
    if not any(served):
        return [None] * len(layers)
    found = together(x, [layer for layer, yes in zip(layers, served, strict=True) if yes], gate)
    return [found.pop(0) if yes else None for yes in served]


def together(x: torch.Tensor, layers: list[Any], gate: Gate | None = None) -> list[torch.Tensor]:
    """What each of these layers answers to x [..., in]: `base(x) + s * B(A(x))`, with one product for every A."""
    thin = factors(x, layers, gate)
    return [layer.base_layer(x) + F.linear(*each) for layer, each in zip(layers, thin, strict=True)]


def factors(x: torch.Tensor, layers: list[Any], gate: Gate | None = None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each layer `s * A(x)` [..., R] and `B` [out, R], with one product for every A."""
    first = [first_matrix(layer) for layer in layers]
    every = torch.cat(first) if len(first) > 1 else first[0]
    every = every if gate is None else every * gate.value
    inner = F.linear(x, every).split([weight.shape[0] for weight in first], -1)
    return [(part, second_matrix(layer)) for layer, part in zip(layers, inner, strict=True)]


def first_matrix(layer: Any, gate: Gate | None = None) -> torch.Tensor:
    """`s A` [R, in], nought where the gate is shut."""
    name = layer.active_adapters[0]
    weight: torch.Tensor = layer.lora_A[name].weight * layer.scaling[name]
    return weight if gate is None else weight * gate.value


def second_matrix(layer: Any) -> torch.Tensor:
    """`B` [out, R]."""
    weight: torch.Tensor = layer.lora_B[layer.active_adapters[0]].weight
    return weight


class _Known:
    """A projection whose answer to `x` is known already."""

    def __init__(self, layer: Any, x: torch.Tensor, output: torch.Tensor) -> None:
        self.layer, self.x, self.output = layer, x, output

    def __call__(self, x: torch.Tensor) -> Any:
        return self.output if x is self.x else self.layer(x)


class _Alone:
    """A projection that shares its input with none."""

    def __init__(self, layer: Any, compute: Compute) -> None:
        self.layer, self.compute = layer, compute

    def __call__(self, x: torch.Tensor) -> Any:
        output = self.compute(x, [self.layer])[0]
        return self.layer(x) if output is None else output


class View:
    """A module as its own `forward` sees it, but for a few of its projections."""

    def __init__(self, module: Any, answers: dict[str, Any]) -> None:
        self.module, self.answers = module, answers

    def __getattr__(self, name: str) -> Any:
        return self.answers[name] if name in self.answers else getattr(self.module, name)
