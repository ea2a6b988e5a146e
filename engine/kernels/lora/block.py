"""A gated feed-forward block in closed form: `down(act(gate(x)) * up(x))`, each projection with an adapter or without.

Gate and up are two projections, or the halves of one (Phi, GLM). Kept are x and the results of gate and up; the product
is computed again in the backward pass, where it, and the two gradients, take the memory of what was kept and of its own
gradient. So the wide tensors held at once are three, where autograd holds up to seven. A second backward pass through
the same node is refused.

Two nodes make one call. The first opens (gate and up) and keeps all that is kept; the second closes (product and down) and
keeps nothing: a checkpoint around the layer stops computing again once the last kept tensor is there, so it leaves out down.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.kernels.gated import gated, gated_gradients
from engine.kernels.lora.projections import (
    Known,
    Projection,
    Wanted,
    Weights,
    chunked,
    dropped,
    forward,
    into_input,
    into_low_rank,
    into_weights,
    low_rank_products,
    rows,
    wanted_of,
    widened,
)


def gated_block(
    x: Tensor, group: Sequence[tuple[Projection, Weights]], activation: str, *, in_place: bool = True
) -> Tensor:
    """`down(act(gate(x)) * up(x))` for x [..., I]; differentiable.

    `group` is gate, up and down, or one projection of gate and up side by side, and down. `in_place` lets the backward pass
    write over what was kept; without it a graph may be gone through twice.
    """
    return GatedBlock(group, activation, in_place=in_place)(x)


class GatedBlock:
    """One call of a block: its projections and their weights as they are now."""

    def __init__(self, group: Sequence[tuple[Projection, Weights]], activation: str, *, in_place: bool = True) -> None:
        *self.front, self.down = (layer for layer, _ in group)
        self.flat = [tensor for _, weights in group for tensor in weights]
        self.activation, self.in_place = activation, in_place
        self.open: tuple[list[Tensor], Known] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (x, *self.flat)):
            held: Tensor = _Opened.apply(self, x, *self.flat)
            out: Tensor = _Closed.apply(held, self)
            return out
        wide, _, of_down = self.opened(rows(x), chunked(self.flat))
        return self.closed(wide, of_down).view(*x.shape[:-1], self.down.width)

    def opened(self, x: Tensor, weights: list[Weights]) -> tuple[list[Tensor], list[Known], Known]:
        """Results of the first projections [N, W], what is known of them, and down's mask, drawn in the layers' order."""
        wide, known = forward(x, self.front, weights[:-1])
        mask, a = None, weights[-1].a
        if self.down.dropout and a is not None:
            _, mask = torch.native_dropout(gate_and_up(wide)[0].to(a.dtype), self.down.dropout, True)
        return wide, known, Known(None, mask)

    def closed(self, wide: list[Tensor], known: Known) -> Tensor:
        """The block's result [N, O]."""
        held = chunked(self.flat)[-1]
        product = gated(*gate_and_up(wide), self.activation)
        return widened(self.down.base(product), self.inner(product, known, held), held.b)

    def inner(self, product: Tensor, known: Known, held: Weights) -> Tensor | None:
        """`s A(product)` of down's adapter, under the mask that was drawn before."""
        if held.a is None or known.mask is None:
            return low_rank_products(product, [self.down], [held])[0].inner
        found = dropped(product, self.down, known, held.a.dtype) @ held.a.T
        return found if self.down.scale == 1 else found * self.down.scale

    def gradients(
        self, x: Tensor, slope: Tensor, inwards: bool, wanted: list[Wanted] | None = None
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Gradients of x [N, I], where `inwards`, and of `flat`, with gate and up computed anew; keeps nothing."""
        weights = chunked(self.flat)
        if wanted is None:
            wanted = wanted_of([each is not None and each.requires_grad for each in self.flat])
        wide, known, of_down = self.opened(x, weights)
        return self.backward(x, wide, [*known, of_down], weights, slope, inwards, wanted)

    def backward(
        self, x: Tensor, wide: list[Tensor], known: list[Known], weights: list[Weights], slope: Tensor, inwards: bool,
        wanted: list[Wanted],
    ) -> tuple[Tensor | None, list[Tensor | None]]:  # fmt: skip
        """As `gradients`, from what was kept; with `in_place` it spends that."""
        (*theirs, held), (*seen, of_down) = weights, known
        into_down = into_low_rank([slope], [self.down], [held], [of_down])
        of_product = into_input([slope], into_down, [self.down], [held], [of_down])
        again = any(wanted[-1][i] for i in (0, 2, 3))
        gate, up = gate_and_up(wide)
        of_gate, of_up, product = gated_gradients(
            of_product, gate, up, self.activation, with_product=again, in_place=self.in_place
        )
        last: list[Tensor | None] = [None, slope.sum(0) if wanted[-1][1] else None, None, None]
        if product is not None:
            now = Known(self.inner(product, of_down, held), of_down.mask)
            last = into_weights(product, [slope], into_down, [self.down], [held], [now], [wanted[-1]])
        del product, of_product
        slopes = [of_gate, of_up]
        if len(wide) == 1:  # written over it, the halves' gradients lie as the halves did
            slopes = wide if self.in_place else [torch.cat(slopes, -1)]
        inner = into_low_rank(slopes, self.front, theirs, seen)
        dx = into_input(slopes, inner, self.front, theirs, seen) if inwards else None
        return dx, [*into_weights(x, slopes, inner, self.front, theirs, seen, wanted[:-1]), *last]


def gate_and_up(wide: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Gate and up of the first projections' results."""
    gate, up = wide if len(wide) == 2 else wide[0].chunk(2, dim=-1)
    return gate, up


class _Opened(torch.autograd.Function):
    """Keeps what the backward pass needs; its output stands for the block's result in the graph and takes no memory."""

    @staticmethod
    def forward(ctx: Any, call: GatedBlock, x: Tensor, *flat: Tensor | None) -> Tensor:
        wide, known, of_down = call.opened(rows(x), chunked(flat))
        ctx.call, ctx.spent = call, False
        call.open = wide, of_down
        ctx.save_for_backward(x, *wide, *(tensor for each in (*known, of_down) for tensor in each), *flat)
        return x.new_zeros(()).expand(*x.shape[:-1], call.down.width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.spent:
            raise RuntimeError(
                "gated_block: the memory of its activations was taken before; a backward pass runs once."
            )
        call, (x, *saved) = ctx.call, ctx.saved_tensors
        ctx.spent = call.in_place
        count = len(call.front)
        wide, more, flat = saved[:count], saved[count : 3 * count + 2], saved[3 * count + 2 :]
        known = [Known(*more[i : i + 2]) for i in range(0, len(more), 2)]
        wanted = wanted_of(ctx.needs_input_grad[2:])
        inwards = ctx.needs_input_grad[1]
        dx, found = call.backward(rows(x), wide, known, chunked(flat), rows(slope), inwards, wanted)
        return None, None if dx is None else dx.view_as(x), *found


class _Closed(torch.autograd.Function):
    """The block's result from what the first node has just computed; hands its gradient on as it is."""

    @staticmethod
    def forward(ctx: Any, held: Tensor, call: GatedBlock) -> Tensor:
        assert call.open is not None
        (wide, of_down), call.open = call.open, None
        return call.closed(wide, of_down).view(*held.shape)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        return slope, None
