"""Routers of a mixture of experts whose block is computed in tiles: a loss that looks at router logits gets those of all tokens, once.

transformers collects router logits by hooks. Those of tiles would come one by one, without gradients, so they are not
recorded, and the router is called once more on all tokens: a product as thin as there are experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import output_capturing

from engine.compat.instances import in_mode

Forward = Callable[[torch.Tensor], torch.Tensor]


def recorded(model: torch.nn.Module, block: torch.nn.Module) -> list[torch.nn.Module]:
    """The parts of the block that are routers, or hold one, whose results the model's loss can look at."""
    kinds: tuple[type, ...] = ()
    for part in model.modules():
        outputs = (getattr(part, "_can_record_outputs", None) or {}) if isinstance(part, PreTrainedModel) else {}
        specs = outputs.get("router_logits", [])
        for spec in specs if isinstance(specs, list) else [specs]:
            kind = getattr(spec, "target_class", spec)
            kinds += (kind,) if isinstance(kind, type) else ()
    return [child for child in block.children() if any(isinstance(each, kinds) for each in child.modules())]


def record_router_logits(
    forward: Forward, block: torch.nn.Module, routers: list[torch.nn.Module], tokens: int, two: torch.Tensor
) -> Forward:
    """`forward` of the block, which takes tiles of so many tokens; router logits are recorded as if it took none. `two` are two
    tokens, (1, 2, H), to try it with."""
    flat = _in_one_row(block, routers, two)

    def recording(hidden_states: torch.Tensor) -> torch.Tensor:
        if hidden_states.shape[:-1].numel() <= tokens:
            return forward(hidden_states)
        with _not_recorded(), _with_what(routers) as beside:
            out = forward(hidden_states)
        for router in routers:
            router(hidden_states.reshape(-1, hidden_states.shape[-1]) if flat else hidden_states, *beside[router])
        return out

    return recording


def _in_one_row(block: Any, routers: list[torch.nn.Module], two: torch.Tensor) -> bool:
    """Whether the block gives its routers the tokens of all rows as one."""
    shapes: list[int] = []
    hooks = [router.register_forward_pre_hook(lambda _, args: shapes.append(args[0].ndim)) for router in routers]
    try:
        with torch.no_grad(), _not_recorded(), in_mode(block, training=False):
            block(two)
    finally:
        for hook in hooks:
            hook.remove()
    return set(shapes) == {2}


@contextmanager
def _with_what(routers: list[torch.nn.Module]) -> Iterator[dict[torch.nn.Module, tuple[Any, ...]]]:
    """What each router is given beside tokens, a bias of the experts in some families, as it was last called."""
    beside: dict[torch.nn.Module, tuple[Any, ...]] = {}
    hooks = [
        router.register_forward_pre_hook(lambda module, args: beside.__setitem__(module, args[1:]))
        for router in routers
    ]
    try:
        yield beside
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _not_recorded() -> Iterator[None]:
    token = output_capturing._active_collector.set(None)
    try:
        yield
    finally:
        output_capturing._active_collector.reset(token)
