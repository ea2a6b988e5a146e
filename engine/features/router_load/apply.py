"""Counts which experts the router chooses in training and adds three curves to what is logged.

`experts/entropy`: how evenly the tokens of a layer spread, 1 where all experts have as many, 0 where one has all; the mean
over layers. `experts/fullest`: the tokens of the fullest expert over those of an even spread; the largest over layers.
`experts/unused`: the share of experts that no token went to. Each covers the steps since the last line. Beside them, every few seconds, the load of each
expert of each layer as a picture (`engine.run.expert_load`). Counts stay on the
device until a line is logged, and ranks are added up; a layer that is computed again for its gradient counts twice
throughout, which changes no share.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from engine.compat.instances import all_of, noted, put
from engine.compat.router_outputs import hand_on_router_logits
from engine.config.tree import RunConfig
from engine.features.applied import Applied
from engine.features.built import Built, Events, Training, base_model
from engine.features.fused_experts.apply import Block, blocks
from engine.features.gradient_checkpointing.tiers import decoder_layers_of
from engine.models.expert_shards import share_of
from engine.run.expert_load import FEATURE, differs_visibly, digits

PICTURE_SECONDS = 10.0
"""Between the first pictures of the load in a run's events: each has a digit for every expert, 6 KiB for 48 layers of 128."""
PICTURES = 64
"""Pictures after which they come half as often: a day has some 450 at most, a month 800."""


def apply(config: RunConfig, built: Built) -> Applied | None:
    """Counts the choices of the policy's routers; None where it has no experts that are called with a router's choice."""
    routed = blocks(built.alone(built.policy))
    if not routed:
        return None
    counts = [_counter(block) for block in routed]
    undos = [_count_choices(block, count) for block, count in zip(routed, counts, strict=True)]
    pictures = None if built.events is None else Pictures(built.events, _layers_of(built, routed))
    undos.append(_log(built.training, counts, pictures))
    if (undo := hand_on_router_logits(base_model(built.policy).base_model)) is not None:
        undos.append(undo)
    return Applied(
        FEATURE, "auto", "curves", len(routed), "layers of experts whose routers' choices are counted", all_of(undos)
    )


def spread(counts: list[Tensor]) -> dict[str, float]:
    """The three curves of counts [E] of every layer; nothing while no token was counted."""
    shares = [count.double() / count.sum() for count in counts if int(count.sum())]
    if not shares:
        return {}
    evenness = [float(torch.special.entr(share).sum()) / math.log(max(len(share), 2)) for share in shares]
    return {
        "experts/entropy": sum(evenness) / len(evenness),
        "experts/fullest": max(float(share.max()) * len(share) for share in shares),
        "experts/unused": sum(int((share == 0).sum()) for share in shares) / sum(map(len, shares)),
    }


class Pictures:
    """Writes the load as a picture into a run's events, where it changed to the eye and less often as the run grows."""

    def __init__(self, events: Events, layers: list[int]) -> None:
        self._events, self._layers = events, layers
        self._last, self._at, self._written = list[str](), -math.inf, 0

    def show(self, rows: list[str]) -> None:
        """Takes each layer's line; the layers are those of the model, in their order."""
        now = time.monotonic()
        soon = now - self._at < PICTURE_SECONDS * 2 ** (self._written // PICTURES)
        if soon or not differs_visibly(self._last, rows):
            return
        self._last, self._at, self._written = rows, now, self._written + 1
        self._events.write("experts", load=rows, layers=self._layers)


def _layers_of(built: Built, routed: list[Block]) -> list[int]:
    """The place of each block's layer among the model's layers, of which the first ones may have no experts."""
    layers = decoder_layers_of(base_model(built.policy))
    place = {id(module): at for at, layer in enumerate(layers) for module in layer.modules()}
    found = [place.get(id(block.experts)) for block in routed]
    known = [at for at in found if at is not None]
    return known if len(known) == len(found) else list(range(len(found)))


def _counter(block: Block) -> Tensor:
    weight = block.experts.get_parameter("down_proj")
    share = share_of(weight)
    experts = weight.shape[0] if share is None else share.experts
    return torch.zeros(experts + 1, dtype=torch.int64, device=weight.device)


def _count_choices(block: Block, count: Tensor) -> Callable[[], None]:
    last = count.shape[0] - 1

    def add(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not module.training:
            return
        chosen = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
        # Ids of no expert, as under expert parallelism, are counted apart.
        places = chosen.detach().reshape(-1).to(torch.int64)
        places = torch.where((places < 0) | (places > last), last, places)
        if torch.compiler.is_compiling():  # which sorts the places of an index_add_, for 0.8 ms a layer on an H100
            count.add_((places[:, None] == torch.arange(last + 1, device=places.device)).sum(0))
        else:
            count.index_add_(0, places, torch.ones_like(places))

    return noted(block.outermost.register_forward_pre_hook(add, with_kwargs=True).remove)


def _log(trainer: Training, counts: list[Tensor], pictures: Pictures | None) -> Callable[[], None]:
    log = trainer.log

    def with_load(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            stacked = trainer.accelerator.reduce(torch.cat(counts), "sum").cpu()
            by_layer = [each[:-1] for each in stacked.split([len(count) for count in counts])]
            logs |= spread(by_layer)
            if pictures is not None and stacked.any():
                pictures.show([digits(each.tolist()) for each in by_layer])
            for count in counts:
                count.zero_()
        log(logs, *args, **kwargs)

    # A line that is written within the next step would hold a part of its counts.
    return all_of([put(trainer, "log", with_load), put(trainer, "logs_late", lambda: False)])
