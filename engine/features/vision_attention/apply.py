"""A vision tower's images, and the windows within them, attend to themselves in one call.

Qwen2.5-VL's tower looks at windows of 112 pixels: a picture of 640 x 480 has 30. With torch's fused attention transformers
cuts queries, keys and values at every window and calls attention for each (5.23), some 120 times a layer for four pictures,
and again in the backward pass: the host cannot keep up. Here each attention of the tower gets its patches whole, with the
bounds beside: on a card in 16 bits torch's attention over documents takes them in one kernel; elsewhere, and where runs
must repeat bit by bit, regions of one length are a batch. Each patch sees what it saw. The host learns the bounds once a
pass, as transformers does in each layer. The modules of this run's models change, no class does.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.compat.instances import all_of, atomic, put
from engine.config.tree import RunConfig
from engine.features.applied import Applied
from engine.features.attention_backend import VARLEN_LEAST, sdpa_cudnn_workaround
from engine.features.attention_backend.varlen import over_documents
from engine.features.built import Built
from engine.features.vision_attention import SERVED

FEATURE = "vision attention"
NAME = "vision_regions"
FUSED = "sdpa", sdpa_cudnn_workaround.NAME
"""Attention that transformers calls for each region by itself."""
_KEPT = 8
"""Bounds that are remembered: two a pass of a tower, and a pass may be computed again."""


@atomic()
def apply(config: RunConfig, built: Built) -> Applied | None:
    """Puts the regions of every tower together; None where no model has one that would take them apart."""
    from transformers import AttentionInterface

    found = [
        module
        for model in built.models()
        for module in model.modules()
        if type(module).__name__ in SERVED and _implementation(module) in FUSED
    ]
    if not found:
        return None
    AttentionInterface.register(NAME, regions_attention_forward)
    remembered = Remembered()
    undos = list[Callable[[], None]]()
    configs: dict[int, Any] = {}
    for module in found:
        held: Any = module.config
        if id(held) not in configs:
            configs[id(held)] = copy.copy(held)
            configs[id(held)]._attn_implementation_internal = NAME
        undos.append(put(module, "config", configs[id(held)]))
        undos.append(put(module, "forward", _with_regions(module.forward, remembered)))
    detail = "images and windows of the vision tower in one call of attention instead of one after the other"
    return Applied(FEATURE, None, "together", len(found), detail, all_of(undos))


def _implementation(module: torch.nn.Module) -> str:
    return str(getattr(getattr(module, "config", None), "_attn_implementation", ""))


def _with_regions(forward: Callable[..., torch.Tensor], remembered: Remembered) -> Callable[..., torch.Tensor]:
    # A compiler would wait for the bounds too, and make a graph of every window.
    @torch.compiler.disable
    def call(hidden_states: torch.Tensor, cu_seqlens: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        undivided = torch.tensor([0, len(hidden_states)])  # on the host, where transformers reads it
        return forward(hidden_states, cu_seqlens=undivided, regions=remembered(cu_seqlens), **kwargs)

    return call


@dataclass(frozen=True)
class Regions:
    """Who sees whom among [P] patches: all those between two bounds."""

    bounds: torch.Tensor
    """[regions + 1] int32, on the patches' device."""
    lengths: tuple[int, ...]
    batches: tuple[tuple[int, torch.Tensor], ...]
    """Each length, and the places [regions * length] of the patches in regions of that length; empty for one length."""
    back: torch.Tensor
    """[P], where each patch stands in the batches."""

    @classmethod
    def of(cls, bounds: torch.Tensor) -> Regions:
        """The regions between these bounds, which are waited for."""
        told = bounds.tolist()
        lengths = tuple(end - start for start, end in itertools.pairwise(told))
        starts: dict[int, list[int]] = {}
        for start, length in zip(told[:-1], lengths, strict=True):
            if length:
                starts.setdefault(length, []).append(start)
        batches: list[tuple[int, torch.Tensor]] = []
        back = torch.empty(0, dtype=torch.long, device=bounds.device)
        if len(starts) > 1:
            places = [(torch.tensor(each)[:, None] + torch.arange(n)).flatten() for n, each in starts.items()]
            back = torch.cat(places).argsort().to(bounds.device)
            batches = [(n, each.to(bounds.device)) for n, each in zip(starts, places, strict=True)]
        return cls(bounds.int(), lengths, tuple(batches), back)


class Remembered:
    """The regions of the bounds that a tower's layers were given: all layers of a pass are given the same tensors."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], Regions]] = {}

    def __call__(self, bounds: torch.Tensor) -> Regions:
        held = self._known.get(id(bounds))
        if held is not None and held[0]() is bounds:
            return held[1]
        if len(self._known) >= _KEPT:
            self._known.clear()
        regions = Regions.of(bounds)
        self._known[id(bounds)] = weakref.ref(bounds), regions
        return regions


def regions_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    regions: Regions | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers' towers call it: query, key, value [1, heads, P, width] to [1, P, heads, width] and no
    weights; without `regions` every patch sees all."""
    if regions is None or len(regions.lengths) == 1:
        out = scaled_dot_product_attention(query, key, value, attention_mask, dropout, scale=scaling)
        return out.transpose(1, 2), None
    if not dropout and _in_one_kernel(query):
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        out = over_documents(q, k, v, regions.bounds, max(regions.lengths), scaling, (-1, -1))
        return out[None], None
    if not regions.batches:
        return _batch((query, key, value), max(regions.lengths), scaling, dropout), None
    parts = [
        _batch([x.index_select(2, places) for x in (query, key, value)], length, scaling, dropout)
        for length, places in regions.batches
    ]
    return torch.cat(parts, 1).index_select(1, regions.back), None


def _in_one_kernel(query: torch.Tensor) -> bool:
    """Whether torch's attention over documents serves; its backward pass does not sum in the same order each time."""
    return (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and not torch.are_deterministic_algorithms_enabled()
        and torch.cuda.get_device_capability(query.device) >= VARLEN_LEAST
    )


def _batch(qkv: Sequence[torch.Tensor], length: int, scaling: float | None, dropout: float) -> torch.Tensor:
    """Regions of one length that stand end to end: query, key and value [1, heads, regions * length, width] to
    [1, regions * length, heads, width]."""
    _, heads, patches, width = qkv[0].shape
    q, k, v = (x.view(heads, -1, length, width).transpose(0, 1) for x in qkv)
    out = scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scaling)
    return out.transpose(1, 2).reshape(1, patches, heads, width)
