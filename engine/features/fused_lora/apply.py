"""`kernels.fused_lora`: LoRA's projections and gated blocks of the decoder layers, with a backward pass of their own.

Queries, keys and values are computed together, a gated feed-forward block whole, every other adapted linear layer by
itself, all in closed form (`engine.kernels.lora`): B·A is never formed and what a backward pass needs is kept once. Each
module gets a `forward` on its instance that looks at its layers at every call; what closed form does not serve then (DoRA,
several adapters, adapters merged or switched off) PEFT computes, and what it never serves is counted in the receipt by
its reason. Blocks that run in tiles are left to those, which compute them in closed form themselves. Refuses a model of
which nothing is served.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from peft.tuners.lora import LoraLayer

from engine.compat.instances import all_of, atomic, put
from engine.config.tree import RunConfig
from engine.errors import ModelError
from engine.features.applied import Applied, left_out
from engine.features.built import Built
from engine.features.compile.grouped import grouped, see
from engine.features.fused_lora.projections import (
    all_described,
    block_names,
    described,
    gated_form,
    in_closed_form,
    is_closed_form,
)
from engine.kernels.lora import gated_block, projected

FEATURE = "fused LoRA"
_TURN_OFF = "Set kernels.fused_lora to false."
_OFF = {"kernels.fused_lora": False}


def apply(config: RunConfig, built: Built) -> Applied | None:
    """Gives the adapted layers of every model of the trainer their closed form; None where it was neither asked for nor left
    to be chosen."""
    if config.kernels.fused_lora is not True:
        return left_out(FEATURE, built.notes.reasons.get("kernels.fused_lora"))
    layers = [layer for layer in built.decoder_layers() if any(map(_adapted, layer.modules()))]
    if not layers:
        raise ModelError(
            "kernels.fused_lora: the model has no decoder layer with a LoRA adapter.", _TURN_OFF
        ).mended_by(_OFF)
    found, undo = fuse(layers)
    if not found.served:
        undo()
        raise ModelError(
            f"kernels.fused_lora: PEFT computes all {sum(found.left.values()):,} adapted projections: {found.reasons()}.",
            _TURN_OFF,
        )
    return Applied(FEATURE, True, "closed form", found.served, found.summary(), undo)


def why_not(built: Built) -> str | None:
    """Why closed form has no place in this trainer's model, or None where it serves something."""
    layers = [part for layer in built.decoder_layers() for part in layer.modules() if _adapted(part)]
    if not layers:
        return "the model has no decoder layer with a LoRA adapter"
    reasons = Counter(reason for layer in layers if isinstance(reason := described(layer), str))
    if reasons.total() < len(layers):
        return None
    return f"PEFT computes all {len(layers):,} adapted projections: {_counted(reasons)}"


def _counted(reasons: Counter[str]) -> str:
    return ", ".join(f"{count:,} with {reason}" for reason, count in reasons.most_common())


@dataclass
class Found:
    """What became of the adapted projections, for the receipt."""

    blocks: int = 0
    tiled: int = 0
    groups: int = 0
    alone: int = 0
    served: int = 0
    left: Counter[str] = field(default_factory=Counter)
    seen: set[int] = field(default_factory=set)

    def count(self, layers: Iterable[Any]) -> None:
        """Notes these layers, once each."""
        for layer in layers:
            if isinstance(layer, LoraLayer) and id(layer) not in self.seen:
                reason = described(layer)
                if isinstance(reason, str):
                    self.left[reason] += 1
                else:
                    self.served += 1
            self.seen.add(id(layer))

    def reasons(self) -> str:
        return _counted(self.left)

    def summary(self) -> str:
        ways = (
            (self.blocks, "gated blocks"),
            (self.tiled, "gated blocks in tiles"),
            (self.groups, "groups of one input"),
            (self.alone, "by themselves"),
        )
        said = f"adapted projections in {', '.join(f'{count:,} {what}' for count, what in ways if count)}"
        return f"{said}; left to PEFT: {self.reasons()}" if self.left else said


@atomic()
def fuse(layers: list[torch.nn.Module]) -> tuple[Found, Callable[[], None]]:
    """Gives every module in these layers that closed form serves its forward; what was found, and the undo."""
    found, undos = Found(), []
    for module in _modules(layers):
        names = block_names(module)
        if names is None:
            continue
        parts = [module._modules[name] for name in names]
        if is_closed_form(module.forward):
            found.tiled += 1
            found.count(parts)
        elif all(map(_serves, parts)) and (activation := gated_form(module)) is not None:
            undos.append(put(module, "forward", _bound(_block(module.forward.__func__, names, activation), module)))
            found.blocks += 1
            found.count(parts)
    for module, names in grouped(layers):
        parts = [module._modules[name] for name in names]
        if parts[0] is not None and id(parts[0]) not in found.seen and any(_adapted(x) and _serves(x) for x in parts):
            undos.append(see(module, names, [], _together))
            found.groups += 1
            found.count(parts)
    for layer in _modules(layers):
        if isinstance(layer, LoraLayer) and id(layer) not in found.seen:
            plain: Any = getattr(getattr(layer, "forward", None), "__func__", None)
            if plain is not None and _serves(layer):
                undos.append(put(layer, "forward", _bound(_alone(plain), layer)))
                found.alone += 1
            found.count([layer])
    return found, all_of(undos)


def _modules(layers: list[torch.nn.Module]) -> Iterator[Any]:
    for layer in layers:
        yield from layer.modules()


def _adapted(module: Any) -> bool:
    return isinstance(module, LoraLayer)


def _serves(layer: Any) -> bool:
    return isinstance(layer, torch.nn.Module) and not isinstance(described(layer), str)


def _bound(forward: Callable[..., Any], module: Any) -> types.MethodType:
    return types.MethodType(in_closed_form(forward), module)


def _block(plain: Callable[..., Any], names: tuple[str, ...], activation: str) -> Callable[..., Any]:
    def forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        group = None if args or kwargs else all_described([getattr(self, name) for name in names], x)
        return plain(self, x, *args, **kwargs) if group is None else gated_block(x, group, activation)

    return forward


def _alone(plain: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        group = None if args or kwargs else all_described([self], x)
        return plain(self, x, *args, **kwargs) if group is None else projected(x, group)[0]

    return forward


def _together(x: torch.Tensor, layers: list[Any]) -> list[torch.Tensor | None]:
    """Those of the group that closed form serves for this input, in one node."""
    if torch.is_autocast_enabled(x.device.type):
        return [None] * len(layers)
    each = [described(layer, x) for layer in layers]
    served = [found for found in each if not isinstance(found, str)]
    outputs = iter(projected(x, served) if served else [])
    return [None if isinstance(found, str) else next(outputs) for found in each]
