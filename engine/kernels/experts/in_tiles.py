"""The experts of a mixture over tiles of the batch's tokens, packed ones unpacked once for all tiles.

The order is experts first: a group of them is unpacked into a bounded room, every tile's tokens pass through it, and the
next group comes. So a batch unpacks each routed expert once in the forward pass and once in the backward pass, however
many tiles it makes, and of what is wide there is one tile's share of one group at a time. What is computed forward is
computed again in the backward pass, tile by tile.

Two nodes make one call, as in other tiles: the first keeps what came in and computes nothing, the second computes and keeps
nothing, so that a checkpoint around the layer does not compute the experts a third time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.kernels.device import kernel_serves
from engine.kernels.experts.launch import Settings
from engine.kernels.experts.packed import PackedExperts
from engine.kernels.experts.reference import ExpertLoRA
from engine.kernels.requirements import EXPERT_BUFFER
from engine.kernels.shapes import first_derivatives_alone

Small = tuple[Tensor | None, ...]
"""Biases of gate and up and of down, then A and B of each adapter."""
_COMPUTING: ContextVar[bool] = ContextVar("computing", default=False)


def computing() -> bool:
    """Whether a tile is being computed whose results must not be kept, by whatever keeps results."""
    return _COMPUTING.get()


@torch.compiler.disable
def expert_mlp_in_tiles(
    x: Tensor, expert_ids: Tensor, routing_weights: Tensor, gate_up: PackedExperts, down: PackedExperts, small: Small,
    settings: Settings, tokens: int, compute: Callable[..., Tensor],
) -> Tensor:  # fmt: skip
    """As `expert_mlp` of packed experts, in even tiles of at most `tokens` tokens; `compute` is `expert_mlp` itself, which
    is given some experts unpacked."""
    count = max(1, -(-len(x) // tokens))
    call = _Call(gate_up, down, settings, max(1, -(-len(x) // count)), compute)
    trained = any(each is not None and each.requires_grad for each in (x, routing_weights, *small))
    if not (torch.is_grad_enabled() and trained):
        return call.result(x, expert_ids, routing_weights, small)
    held: Tensor = _Held.apply(call, x, expert_ids, routing_weights, *small)
    detached = (None if each is None else each.detach() for each in small)
    out: Tensor = _Computed.apply(held, call, x.detach(), expert_ids, routing_weights.detach(), *detached)
    return out


class _Group(NamedTuple):
    """Experts that are unpacked now: the first one's number, and their weights."""

    first: int
    gate_up: Tensor
    down: Tensor


class _Call:
    """What both passes know."""

    def __init__(
        self, gate_up: PackedExperts, down: PackedExperts, settings: Settings, size: int, compute: Callable[..., Tensor]
    ) -> None:
        self.gate_up, self.down, self.settings, self.size, self.compute = gate_up, down, settings, size, compute

    def groups(self, ids: Tensor) -> Iterator[_Group]:
        """All routed experts, as many at a time as the room holds, one on a CPU."""
        both, experts = (self.gate_up, self.down), self.gate_up.shape[0]
        each = sum(packed.form.rows * packed.form.columns * packed.element_size() for packed in both)
        fit = max(1, min(EXPERT_BUFFER // each, experts)) if kernel_serves(self.gate_up.held.numbers) else 1
        at_once = -(-experts // -(-experts // fit))
        rooms = [
            torch.empty(at_once, packed.form.rows, packed.form.columns, dtype=packed.dtype, device=packed.device)
            for packed in both
        ]
        counts = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device)
        flat = ids.reshape(-1).long()
        counts.scatter_add_(0, torch.where((flat >= 0) & (flat < experts), flat, experts), torch.ones_like(flat))
        starts = torch.cat([counts.new_zeros(1), counts[:experts].cumsum(0)]).int()
        for first in range(0, experts, at_once):
            shown = []
            for packed, room in zip(both, rooms, strict=True):
                some = room[: experts - first]
                packed.unpack_range(first, some, starts)
                shown.append(some.transpose(1, 2) if packed.form.turned else some)
            yield _Group(first, *shown)

    def tiles(self, count: int) -> Iterator[slice]:
        return (slice(begin, begin + self.size) for begin in range(0, count, self.size))

    def of_group(self, group: _Group, x: Tensor, ids: Tensor, routing: Tensor, small: Small) -> Tensor:
        """What these experts add to the tokens of one tile; `small` is theirs."""
        count = len(group.gate_up)
        inside = (ids >= group.first) & (ids < group.first + count)
        loras = [
            None if a is None or b is None else ExpertLoRA(a, b, scale)
            for a, b, scale in zip(
                small[2::2], small[3::2], (self.settings.gate_up_scale, self.settings.down_scale), strict=True
            )
        ]
        return self.compute(
            x, torch.where(inside, ids - group.first, count), routing, group.gate_up, group.down, gate_up_bias=small[0],
            down_bias=small[1], gate_up_lora=loras[0], down_lora=loras[1], gate=self.settings.gate,
        )  # fmt: skip

    def result(self, x: Tensor, ids: Tensor, routing: Tensor, small: Small) -> Tensor:
        out = x.new_zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))
        computing = _COMPUTING.set(True)
        try:
            with torch.no_grad():
                for group in self.groups(ids):
                    own = _of(group, small)
                    for tile in self.tiles(len(x)):
                        out[tile] += self.of_group(group, x[tile], ids[tile], routing[tile], own)
        finally:
            _COMPUTING.reset(computing)
        return out.to(x.dtype)


def _of(group: _Group, small: Small) -> Small:
    """The parts of these experts."""
    place = slice(group.first, group.first + len(group.gate_up))
    return tuple(None if part is None else part.detach()[place] for part in small)


class _Held(torch.autograd.Function):
    """Keeps what came in; its output stands for the result in the graph and takes no memory."""

    @staticmethod
    def forward(ctx: Any, call: _Call, x: Tensor, ids: Tensor, routing: Tensor, *small: Tensor | None) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(x, ids, routing, *small)
        return x.new_zeros(()).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        first_derivatives_alone("expert_mlp")
        call: _Call = ctx.call
        x, ids, routing, *small = ctx.saved_tensors
        need = ctx.needs_input_grad
        wanted = (need[1], need[3], *need[4:])
        wide = [torch.promote_types(each.dtype, torch.float32) if each is not None else None for each in small]
        dx, d_routing = (
            torch.zeros_like(each, dtype=torch.promote_types(each.dtype, torch.float32)) if asked else None
            for each, asked in zip((x, routing), wanted[:2], strict=True)
        )
        found = [
            torch.zeros_like(each) if each is not None and asked else None
            for each, asked in zip(small, wanted[2:], strict=True)
        ]
        for group in call.groups(ids):
            own = _of(group, tuple(small))
            place = slice(group.first, group.first + len(group.gate_up))
            sums: list[Tensor | None] = [
                None if part is None or total is None else torch.zeros_like(part, dtype=dtype)
                for part, total, dtype in zip(own, found, wide, strict=True)
            ]
            for tile in call.tiles(len(x)):
                places = [None if total is None else total[tile] for total in (dx, d_routing)] + sums
                inputs = [
                    None if part is None else part.detach().requires_grad_(total is not None)
                    for part, total in zip((x[tile], routing[tile], *own), places, strict=True)
                ]
                own_x, own_routing, *given = inputs
                assert own_x is not None
                assert own_routing is not None
                asked = [part for part in inputs if part is not None and part.requires_grad]
                with torch.enable_grad():
                    out = call.of_group(group, own_x, ids[tile], own_routing, tuple(given))
                gradients = iter(torch.autograd.grad(out, asked, grads[0][tile]))
                for part, total in zip(inputs, places, strict=True):
                    if part is not None and total is not None:
                        total += next(gradients)
            for total, part in zip(found, sums, strict=True):
                if total is not None and part is not None:
                    total[place] = part
        inwards = None if dx is None else dx.to(x.dtype)
        return None, inwards, None, None if d_routing is None else d_routing.to(routing.dtype), *found


class _Computed(torch.autograd.Function):
    """The result; hands its gradient on as it is."""

    @staticmethod
    def forward(
        ctx: Any, held: Tensor, call: _Call, x: Tensor, ids: Tensor, routing: Tensor, *small: Tensor | None
    ) -> Tensor:
        ctx.count = len(small)
        return call.result(x, ids, routing, small)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None, None, None, None, *(None for _ in range(ctx.count))
