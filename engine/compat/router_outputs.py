"""What transformers records of a mixture's routers while a layer computes, from layers that are compiled.

transformers hears routers by hooks that look into a context variable, at which torch's compiler breaks a layer into pieces.
Hooks of the same effect put what they hear into a list that the compiled code makes and gives back; outside of such a layer
they are transformers' own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.utils import output_capturing

from engine.compat.instances import all_of, noted

KEY = "router_logits"


class _Hearing:
    """Where a layer's routers are heard while it is called by `heard_call`."""

    here: list[Tensor] | None = None


_HEARING = _Hearing()


def recording() -> list[Tensor] | None:
    """Where transformers collects what routers say at this moment; None where it does not, or collects other things too."""
    found: dict[str, list[Tensor]] | None = output_capturing._active_collector.get()
    return found[KEY] if found is not None and found.keys() == {KEY} else None


def hear_in_graphs(layer: torch.nn.Module) -> Callable[[], None]:
    """Puts hooks that a compiler can follow in the places of transformers' own, inside of this layer; returns the undo."""
    undos = []
    for module in layer.modules():
        for number, hook in module._forward_hooks.items():
            if getattr(hook, "__module__", "") == output_capturing.__name__:
                told = inspect.getclosurevars(hook).nonlocals
                module._forward_hooks[number] = _hearing(told["key"], told["index"], hook)
                undos.append(_putting_back(module, number, hook))
    return noted(all_of(undos))


def heard_call(call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, tuple[Tensor, ...]]:
    """The call's answer, and what the routers of a layer with `hear_in_graphs` said in it."""
    heard: list[Tensor] = []
    _HEARING.here = heard
    try:
        out = call(*args, **kwargs)
    finally:
        _HEARING.here = None
    return out, tuple(heard)


def _hearing(key: str, index: int, hook: Callable[..., None]) -> Callable[..., None]:
    def hear(module: torch.nn.Module, args: Any, output: Any) -> None:
        heard = _HEARING.here
        if heard is None:
            hook(module, args, output)
        elif key == KEY:
            found = output[index] if isinstance(output, tuple) else output
            if found is not None:
                heard.append(found)

    return hear


def _putting_back(module: torch.nn.Module, number: int, hook: Callable[..., None]) -> Callable[[], None]:
    def undo() -> None:
        if number in module._forward_hooks:
            module._forward_hooks[number] = hook

    return undo
