"""A gated feed-forward block in closed form: `down(act(gate(x)) * up(x))`, each projection with an adapter or without.

Kept are x and the results of gate and up; the product is computed again in the backward pass, where it, and the two
gradients, take the memory of what was kept and of its own gradient. So the wide tensors held at once are three, where
autograd holds up to seven. A second backward pass through the same node is refused.

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
    into_thin,
    into_weights,
    rows,
    thin,
    wanted_of,
    widened,
)


def gated_block(
    x: Tensor, group: Sequence[tuple[Projection, Weights]], activation: str, *, in_place: bool = True
) -> Tensor:
    """`down(act(gate(x)) * up(x))` for x [..., I], with `group` gate, up and down; differentiable.

    `in_place` lets the backward pass write over what was kept; without it a graph may be gone through twice.
    """
    return GatedBlock(group, activation, in_place=in_place)(x)


class GatedBlock:
    """One call of a block: its projections and their weights as they are now."""

    def __init__(self, group: Sequence[tuple[Projection, Weights]], activation: str, *, in_place: bool = True) -> None:
        self.layers = [layer for layer, _ in group]
        self.flat = [tensor for _, weights in group for tensor in weights]
        self.activation, self.in_place = activation, in_place
        self.open: tuple[Tensor, Tensor, Known] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (x, *self.flat)):
            held: Tensor = _Opened.apply(self, x, *self.flat)
            out: Tensor = _Closed.apply(held, self)
            return out
        gate, up, _, of_down = self.opened(rows(x), chunked(self.flat))
        return self.closed(gate, up, of_down, chunked(self.flat)[2]).view(*x.shape[:-1], -1)

    def opened(self, x: Tensor, weights: list[Weights]) -> tuple[Tensor, Tensor, list[Known], Known]:
        """Results of gate and up [N, W], what is known of both, and down's mask, drawn in the order of the layers."""
        (gate, up), known = forward(x, self.layers[:2], weights[:2])
        down, mask = self.layers[2], None
        if down.dropout and weights[2].a is not None:
            _, mask = torch.native_dropout(gate.to(weights[2].a.dtype), down.dropout, True)
        return gate, up, known, Known(None, mask)

    def closed(self, gate: Tensor, up: Tensor, known: Known, held: Weights) -> Tensor:
        """The block's result [N, O]."""
        product = gated(gate, up, self.activation)
        return widened(self.layers[2].base(product), self.inner(product, known, held), held.b)

    def inner(self, product: Tensor, known: Known, held: Weights) -> Tensor | None:
        """`s A(product)` of down's adapter, under the mask that was drawn before."""
        layer = self.layers[2]
        if held.a is None or known.mask is None:
            return thin(product, [layer], [held])[0].inner
        found = dropped(product, layer, known, held.a.dtype) @ held.a.T
        return found if layer.scale == 1 else found * layer.scale

    def gradients(
        self, x: Tensor, slope: Tensor, inwards: bool, wanted: list[Wanted] | None = None
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Gradients of x [N, I], where `inwards`, and of `flat`, with gate and up computed anew; keeps nothing."""
        weights = chunked(self.flat)
        if wanted is None:
            wanted = wanted_of([each is not None and each.requires_grad for each in self.flat])
        gate, up, known, of_down = self.opened(x, weights)
        return self.backward(x, gate, up, [*known, of_down], weights, slope, inwards, wanted)

    def backward(
        self, x: Tensor, gate: Tensor, up: Tensor, known: list[Known], weights: list[Weights], slope: Tensor,
        inwards: bool, wanted: list[Wanted],
    ) -> tuple[Tensor | None, list[Tensor | None]]:  # fmt: skip
        """As `gradients`, from what was kept; with `in_place` it spends gate and up."""
        (*front, down), (*theirs, held) = self.layers, weights
        into_down = into_thin([slope], [down], [held], [known[2]])
        of_product = into_input([slope], into_down, [down], [held], [known[2]])
        again = any(wanted[2][i] for i in (0, 2, 3))
        of_gate, of_up, product = gated_gradients(
            of_product, gate, up, self.activation, with_product=again, in_place=self.in_place
        )
        of_down: list[Tensor | None] = [None, slope.sum(0) if wanted[2][1] else None, None, None]
        if product is not None:
            seen = Known(self.inner(product, known[2], held), known[2].mask)
            of_down = into_weights(product, [slope], into_down, [down], [held], [seen], [wanted[2]])
        del product, of_product
        slopes = [of_gate, of_up]
        inner = into_thin(slopes, front, theirs, known[:2])
        dx = into_input(slopes, inner, front, theirs, known[:2]) if inwards else None
        return dx, [*into_weights(x, slopes, inner, front, theirs, known[:2], wanted[:2]), *of_down]


class _Opened(torch.autograd.Function):
    """Keeps what the backward pass needs; its output stands for the block's result in the graph and takes no memory."""

    @staticmethod
    def forward(ctx: Any, call: GatedBlock, x: Tensor, *flat: Tensor | None) -> Tensor:
        gate, up, known, of_down = call.opened(rows(x), chunked(flat))
        ctx.call, ctx.spent = call, False
        call.open = gate, up, of_down
        ctx.save_for_backward(x, gate, up, *(tensor for each in (*known, of_down) for tensor in each), *flat)
        return x.new_zeros(()).expand(*x.shape[:-1], call.layers[2].width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.spent:
            raise RuntimeError(
                "gated_block: the memory of its activations was taken before; a backward pass runs once."
            )
        call, (x, gate, up, *saved) = ctx.call, ctx.saved_tensors
        ctx.spent = call.in_place
        known = [Known(*saved[i : i + 2]) for i in range(0, 6, 2)]
        wanted = wanted_of(ctx.needs_input_grad[2:])
        inwards = ctx.needs_input_grad[1]
        dx, found = call.backward(rows(x), gate, up, known, chunked(saved[6:]), rows(slope), inwards, wanted)
        return None, None if dx is None else dx.view_as(x), *found


class _Closed(torch.autograd.Function):
    """The block's result from what the first node has just computed; hands its gradient on as it is."""

    @staticmethod
    def forward(ctx: Any, held: Tensor, call: GatedBlock) -> Tensor:
        assert call.open is not None
        gate, up, of_down = call.open
        call.open = None
        return call.closed(gate, up, of_down, chunked(call.flat)[2]).view(*held.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        return slope, None
