"""What NCCL's ring computes, over gloo and the slow way: all keys and values of a row on each process, under a mask."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

NAME = "gathered"


class _Gathered(torch.autograd.Function):
    """[parts, ...] of all processes; the gradient of each part goes back to its process."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (grad,) = grads
        dist.all_reduce(grad := grad.contiguous(), group=ctx.group)
        return grad[dist.get_rank(ctx.group)], None


def _in_order(parts: torch.Tensor) -> torch.Tensor:
    """[size, B, heads, T / size, width], two pieces each, as [B, heads, T, width]."""
    front, back = parts.chunk(2, dim=3)
    return torch.cat([*front, *back.flip(0)], dim=2)


def _attention(group: Any) -> Any:
    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: Any = None, **_: Any) -> Any:
        key, value = (_in_order(_Gathered.apply(each, group)) for each in (key, value))
        size, place, own = dist.get_world_size(group), dist.get_rank(group), query.shape[2]
        pieces = torch.arange(own * size).chunk(2 * size)
        places = torch.cat([pieces[place], pieces[2 * size - 1 - place]])
        seen = places[:, None] >= torch.arange(own * size)
        shared = query.shape[1] != key.shape[1]
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scaling, enable_gqa=shared)
        return out.transpose(1, 2).contiguous(), None

    return attend


@contextlib.contextmanager
def _ring_attention(model: Any, mesh: Any) -> Iterator[None]:
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention(mesh.get_group()))
    before, model.config._attn_implementation = model.config._attn_implementation, NAME
    try:
        yield
    finally:
        model.config._attn_implementation = before


def install() -> None:
    """In this process from now on a CPU has a ring."""
    from torch.distributed.device_mesh import init_device_mesh

    from engine import rules
    from engine.trainers import context_parallel

    of_cards = ("context-parallel-needs-gpus", "context-parallel-without-other-numbers")
    rules.RULES = tuple(each for each in rules.RULES if each.name not in of_cards)

    def divide_rows(self: Any, size: int) -> None:
        ranks, rank = self.args.world_size, self.args.process_index
        assert context_parallel.lacking(self.model) is None or hasattr(self.model, "peft_config")
        mesh = init_device_mesh("cpu", (ranks // size, size), mesh_dim_names=("batch", "ring"))
        self.divide_in(context_parallel.Ring(size, rank, ranks, mesh["ring"]))

    context_parallel.ring_attention = _ring_attention
    context_parallel.DividesRows.divide_rows = divide_rows  # type: ignore[method-assign]
