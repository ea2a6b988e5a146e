"""What transformers records of a mixture's routers while a layer computes, from layers that are compiled.

transformers records router logits by hooks that read a context variable, at which torch's compiler breaks a layer into
pieces. Hooks of the same effect append to a list that the compiled code makes and returns; outside of such a layer they are
transformers' own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.utils import output_capturing

from engine.compat.instances import all_of, noted, put

KEY = "router_logits"


def hand_on_router_logits(backbone: torch.nn.Module) -> Callable[[], None] | None:
    """Has a GraniteMoE of transformers 5.17, which records no router logits though its loss is asked of them, hand on those of
    its routers; returns the undo, None for any other backbone."""
    kind = type(backbone)
    of_granite = kind.__module__.startswith("transformers.models.granitemoe")
    if not of_granite or KEY in (getattr(kind, "_can_record_outputs", None) or {}):
        return None
    passes: list[list[Tensor]] = []
    plain: Any = backbone.forward
    settings: Any = backbone.config

    def note_choice(router: torch.nn.Module, args: Any, chosen: tuple[Tensor, Tensor, Tensor]) -> None:
        # What is computed again for its gradients is nobody's answer, and would hold all that it was computed from.
        if passes:
            passes[-1].append(chosen[2])

    def forward(*args: Any, output_router_logits: bool | None = None, **kwargs: Any) -> Any:
        wanted = settings.output_router_logits if output_router_logits is None else output_router_logits
        heard: list[Tensor] = []
        passes.append(heard)
        try:
            out = plain(*args, **kwargs)
        finally:
            passes.pop()
        if wanted:
            out[KEY] = tuple(heard)
        return out

    routers = [module for module in backbone.modules() if type(module).__name__.endswith("TopKRouter")]
    undos = [module.register_forward_hook(note_choice).remove for module in routers]
    return noted(all_of([put(backbone, "forward", forward), *undos]))


class _Recorder:
    """Where the router logits of a layer go while it is called by `call_with_router_logits`."""

    logits: list[Tensor] | None = None


_RECORDER = _Recorder()


def recording() -> list[Tensor] | None:
    """The list in which transformers collects router logits now; None where it does not, or collects other outputs too."""
    collector: dict[str, list[Tensor]] | None = output_capturing._active_collector.get()
    return collector[KEY] if collector is not None and collector.keys() == {KEY} else None


def install_graph_hooks(layer: torch.nn.Module) -> Callable[[], None]:
    """Replaces transformers' hooks inside this layer by hooks that a compiler can trace; returns the undo."""
    undos = []
    for module in layer.modules():
        for number, hook in module._forward_hooks.items():
            if getattr(hook, "__module__", "") == output_capturing.__name__:
                captured = inspect.getclosurevars(hook).nonlocals
                module._forward_hooks[number] = _graph_hook(captured["key"], captured["index"], hook)
                undos.append(_restoring(module, number, hook))
    return noted(all_of(undos))


def call_with_router_logits(call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, tuple[Tensor, ...]]:
    """The call's result, and the router logits recorded in it, of a layer with `install_graph_hooks`."""
    logits: list[Tensor] = []
    _RECORDER.logits = logits
    try:
        out = call(*args, **kwargs)
    finally:
        _RECORDER.logits = None
    return out, tuple(logits)


def _graph_hook(key: str, index: int, hook: Callable[..., None]) -> Callable[..., None]:
    def record(module: torch.nn.Module, args: Any, output: Any) -> None:
        logits = _RECORDER.logits
        if logits is None:
            hook(module, args, output)
        elif key == KEY:
            value = output[index] if isinstance(output, tuple) else output
            if value is not None:
                logits.append(value)

    return record


def _restoring(module: torch.nn.Module, number: int, hook: Callable[..., None]) -> Callable[[], None]:
    def undo() -> None:
        if number in module._forward_hooks:
            module._forward_hooks[number] = hook

    return undo
