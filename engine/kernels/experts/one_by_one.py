"""The pass over packed experts where no kernel serves: routed experts are unpacked and computed one after the other.

Each is unpacked and computed again in the backward pass; nothing of it is kept in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.kernels.experts.launch import Settings
from engine.kernels.experts.packed import PackedExperts
from engine.kernels.experts.reference import ExpertLoRA, expert_mlp_reference
from engine.kernels.shapes import first_derivatives_alone


def expert_mlp_one_by_one(
    x: Tensor, expert_ids: Tensor, routing_weights: Tensor, weights: list[Tensor | None], settings: Settings
) -> Tensor:
    """As `expert_mlp`, the first two of `weights` packed, x in their format."""
    out: Tensor = _OneByOne.apply(settings, *weights[:2], x, expert_ids, routing_weights, *weights[2:])
    return out


class _OneByOne(torch.autograd.Function):
    """Keeps tokens, ids, routing weights and adapters. Computes in the weights' format, also under autocast."""

    @staticmethod
    def forward(
        ctx: Any, settings: Settings, gate_up: PackedExperts, down: PackedExperts, x: Tensor, ids: Tensor,
        routing: Tensor, *small: Tensor | None,
    ) -> Tensor:  # fmt: skip
        every = x.new_zeros(ids.numel(), x.shape[1])
        for turn in _turns(gate_up, down, small, x, ids, routing):
            with torch.autocast(x.device.type, enabled=False):
                every[turn.slots] = _computed(turn.x, turn.routing, turn.weights, settings)
        ctx.settings, ctx.packed = settings, (gate_up, down)
        ctx.save_for_backward(x, ids, routing, *small)
        return _by_token(every, ids, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        first_derivatives_alone("expert_mlp")
        x, ids, routing, *small = ctx.saved_tensors
        _, _, _, need_x, _, need_routing, *need = ctx.needs_input_grad
        d_slots = x.new_zeros(ids.numel(), x.shape[1])
        d_routing = routing.new_zeros(routing.shape)  # in one piece, also where they were a transposed view
        found = [torch.zeros_like(part) if wanted else None for part, wanted in zip(small, need, strict=True)]
        gate_up, down = ctx.packed
        for turn in _turns(gate_up, down, small, x, ids, routing):
            given = [turn.x, turn.routing, *turn.weights]
            wanted = [need_x, need_routing, False, False, *need]
            places = [d_slots, d_routing.view(-1, 1), None, None, *found]
            inputs = [
                None if part is None else part.detach().requires_grad_(asked)
                for part, asked in zip(given, wanted, strict=True)
            ]
            own_x, own_routing, *weights = inputs
            assert own_x is not None
            assert own_routing is not None
            with torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
                out = _computed(own_x, own_routing, weights, ctx.settings)
            asked = [part for part in inputs if part is not None and part.requires_grad]
            gradients = iter(torch.autograd.grad(out, asked, grads[0][turn.slots // ids.shape[1]]) if asked else ())
            for number, (part, place) in enumerate(zip(inputs, places, strict=True)):
                if part is not None and part.requires_grad and place is not None:
                    place[turn.slots if number < 2 else [turn.expert]] = next(gradients)
        dx = _by_token(d_slots, ids, x) if need_x else None
        return None, None, None, dx, None, d_routing if need_routing else None, *found


class _Turn(NamedTuple):
    """A routed expert: its slots [n], their tokens [n, H] and routing weights [n, 1], and its weights, [1, ...] each."""

    expert: int
    slots: Tensor
    x: Tensor
    routing: Tensor
    weights: list[Tensor | None]


def _turns(
    gate_up: PackedExperts, down: PackedExperts, small: Sequence[Tensor | None], x: Tensor, ids: Tensor, routing: Tensor
) -> Iterator[_Turn]:
    """Each routed expert, unpacked into the room of the one before."""
    flat = ids.reshape(-1).long()
    rooms = [x.new_empty(each.form.rows, each.form.columns, dtype=each.dtype) for each in (gate_up, down)]
    for expert in range(gate_up.shape[0]):
        slots = (flat == expert).nonzero().squeeze(1)
        if slots.numel():
            held: list[Tensor | None] = [
                packed.unpack(expert, room)[None] for packed, room in zip((gate_up, down), rooms, strict=True)
            ]
            held += [None if part is None else part[expert : expert + 1] for part in small]
            yield _Turn(expert, slots, x[slots // ids.shape[1]], routing.reshape(-1)[slots, None], held)


def _computed(x: Tensor, routing: Tensor, weights: Sequence[Tensor | None], settings: Settings) -> Tensor:
    """[n, H]: the rows of one expert."""
    gate_up, down, gate_up_bias, down_bias, *factors = weights
    assert gate_up is not None
    assert down is not None
    loras = [
        None if a is None or b is None else ExpertLoRA(a, b, scale)
        for a, b, scale in zip(factors[::2], factors[1::2], (settings.gate_up_scale, settings.down_scale), strict=True)
    ]
    ids = torch.zeros(len(x), 1, dtype=torch.long, device=x.device)
    return expert_mlp_reference(
        x, ids, routing, gate_up, down, gate_up_bias=gate_up_bias, down_bias=down_bias,
        gate_up_lora=loras[0], down_lora=loras[1], gate=settings.gate,
    )  # fmt: skip


def _by_token(every: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    """[T, H]: the sum of each token's slots."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return every.view(*ids.shape, x.shape[1]).sum(1, dtype=wide).to(x.dtype)
