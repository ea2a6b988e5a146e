"""Projections of one input: their low-rank products taken together, gradients of input and adapters in closed form.

The backward pass has one product with the input for every A of the group, one into the input's gradient for all of them,
and adds the wide ones into one sum. An adapter's dropout keeps its mask alone.
Names: N tokens, I and O sizes of a layer, r the adapter's rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_in_torch_dispatch_mode


@dataclass(frozen=True)
class Projection:
    """One linear layer as it computes: `base` gives `x @ W.T` and its bias outside autograd, `wide` W [O, I] in a format.

    `scale` is the adapter's, `dropout` the share of its inputs that is dropped, `width` is O.
    """

    base: Callable[[Tensor], Tensor]
    wide: Callable[[torch.dtype], Tensor]
    width: int
    scale: float = 1.0
    dropout: float = 0.0


class Weights(NamedTuple):
    """What of a projection may get a gradient: weight and bias of the base where they train, A [r, I] and B [O, r]."""

    weight: Tensor | None = None
    bias: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None


class Known(NamedTuple):
    """What the forward pass leaves of one projection: `s A(x)` [N, r], and the mask of its dropout [N, I], bool."""

    inner: Tensor | None = None
    mask: Tensor | None = None


def projected(x: Tensor, group: Sequence[tuple[Projection, Weights]]) -> list[Tensor]:
    """What each layer answers to x [..., I]: `base(x) + s * dropout(x) @ A.T @ B.T`, [..., O]; differentiable."""
    layers = [layer for layer, _ in group]
    flat = [tensor for _, weights in group for tensor in weights]
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (x, *flat)):
        return list(_Projected.apply(layers, x, *flat))
    outputs, _ = forward(rows(x), layers, [weights for _, weights in group])
    return [each.view(*x.shape[:-1], each.shape[-1]) for each in outputs]


def rows(x: Tensor) -> Tensor:
    """x [..., I] as [N, I]."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def chunked(flat: Sequence[Any]) -> list[Weights]:
    """Four tensors a projection, as they were handed to autograd."""
    return [Weights(*flat[i : i + 4]) for i in range(0, len(flat), 4)]


def forward(x: Tensor, layers: Sequence[Projection], weights: Sequence[Weights]) -> tuple[list[Tensor], list[Known]]:
    """Results [N, O] and what is known of each, for x [N, I]."""
    known = low_rank_products(x, layers, weights)
    outputs = [
        widened(layer.base(x), each.inner, held.b) for layer, each, held in zip(layers, known, weights, strict=True)
    ]
    return outputs, known


def low_rank_products(x: Tensor, layers: Sequence[Projection], weights: Sequence[Weights]) -> list[Known]:
    """`s A(x)` of each layer that has an A, in A's format; one product for all that drop nothing of x."""
    found = [Known() for _ in layers]
    together = [i for i, held in enumerate(weights) if held.a is not None and not layers[i].dropout]
    if together:
        firsts = [_a(weights[i]) for i in together]
        every = torch.cat(firsts) if len(firsts) > 1 else firsts[0]
        parts = _apart(
            x.to(every.dtype) @ every.T, [each.shape[0] for each in firsts], [layers[i].scale for i in together]
        )
        for i, part in zip(together, parts, strict=True):
            found[i] = Known(part)
    for i, (layer, held) in enumerate(zip(layers, weights, strict=True)):
        if held.a is not None and layer.dropout:
            dropped, mask = torch.native_dropout(x.to(held.a.dtype), layer.dropout, True)
            found[i] = Known(_scaled(dropped @ held.a.T, layer.scale), mask)
    return found


def widened(out: Tensor, inner: Tensor | None, b: Tensor | None) -> Tensor:
    """`out + inner @ B.T`, into out's memory where nothing else may hold it."""
    if inner is None or b is None:
        return out
    if inner.dtype != out.dtype:
        return (out + inner @ b.T).to(out.dtype)
    # A mode that looks at each operation, as selective checkpointing does, may keep what `base` made.
    return torch.addmm(out, inner, b.T) if is_in_torch_dispatch_mode() else out.addmm_(inner, b.T)


def _a(held: Weights) -> Tensor:
    assert held.a is not None
    return held.a


def _scaled(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1 else x * scale


Wanted = tuple[bool, bool, bool, bool]


def _apart(joined: Tensor, sizes: Sequence[int], scales: Sequence[float]) -> list[Tensor]:
    """Columns of each layer, scaled; in one step where all have one scale, as they have but for patterns of ranks."""
    if len(set(scales)) == 1:
        return list(_scaled(joined, scales[0]).split(list(sizes), -1))
    return [_scaled(part, scale) for part, scale in zip(joined.split(list(sizes), -1), scales, strict=True)]


class Inner(NamedTuple):
    """Gradients of `A(x)` [N, r] of each layer, in A's format, and side by side those of the layers that see all of x."""

    parts: list[Tensor | None]
    joined: Tensor | None
    together: list[int]


def into_low_rank(
    slopes: Sequence[Tensor], layers: Sequence[Projection], weights: Sequence[Weights], known: Sequence[Known]
) -> Inner:
    """For the results' gradients [N, O]."""
    parts: list[Tensor | None] = [
        None if held.b is None else _scaled(slope.to(held.b.dtype) @ held.b, layer.scale)
        for slope, layer, held in zip(slopes, layers, weights, strict=True)
    ]
    together = [i for i, part in enumerate(parts) if part is not None and known[i].mask is None]
    return Inner(parts, _joined([parts[i] for i in together], -1) if together else None, together)


def _joined(parts: Sequence[Tensor | None], dim: int) -> Tensor:
    found = [part for part in parts if part is not None]
    return torch.cat(found, dim) if len(found) > 1 else found[0]


def dropped(x: Tensor, layer: Projection, known: Known, dtype: torch.dtype) -> Tensor:
    """The adapter's input: x where the mask lets it through."""
    x = x.to(dtype)
    return x if known.mask is None else x * known.mask * (1 / (1 - layer.dropout))


def into_input(
    slopes: Sequence[Tensor], inner: Inner, layers: Sequence[Projection], weights: Sequence[Weights],
    known: Sequence[Known],
) -> Tensor:  # fmt: skip
    """The input's gradient [N, I]: those of the base weights into one sum, the low-rank ones at once."""
    total: Tensor | None = None
    for slope, layer in zip(slopes, layers, strict=True):
        wide = layer.wide(slope.dtype)
        total = slope @ wide if total is None else total.addmm_(slope, wide)
    assert total is not None
    if inner.joined is not None:
        firsts = _joined([_a(weights[i]) for i in inner.together], 0)
        one_format = inner.joined.dtype == total.dtype
        total = (
            total.addmm_(inner.joined, firsts) if one_format else total.add_((inner.joined @ firsts).to(total.dtype))
        )
    for i, part in enumerate(inner.parts):
        if part is not None and known[i].mask is not None:
            total += dropped(part @ _a(weights[i]), layers[i], known[i], total.dtype)
    return total


def into_weights(
    x: Tensor, slopes: Sequence[Tensor], inner: Inner, layers: Sequence[Projection], weights: Sequence[Weights],
    known: Sequence[Known], wanted: Sequence[Wanted],
) -> list[Tensor | None]:  # fmt: skip
    """Gradients of four tensors a projection, None where not wanted; one product with x for all A's that saw all of it."""
    firsts: dict[int, Tensor] = {}
    if inner.joined is not None and any(wanted[i][2] for i in inner.together):
        sizes = [_a(weights[i]).shape[0] for i in inner.together]
        every = inner.joined.T @ x.to(inner.joined.dtype)
        firsts = dict(zip(inner.together, every.split(sizes), strict=True))
    found: list[Tensor | None] = []
    for i, (slope, layer, held, each) in enumerate(zip(slopes, layers, weights, known, strict=True)):
        part = inner.parts[i]
        if part is not None and wanted[i][2] and i not in firsts:
            firsts[i] = part.T @ dropped(x, layer, each, part.dtype)
        b = None
        if wanted[i][3] and each.inner is not None and held.b is not None:
            b = slope.to(held.b.dtype).T @ each.inner
        a = firsts.get(i) if wanted[i][2] else None
        found += [slope.T @ x if wanted[i][0] else None, slope.sum(0) if wanted[i][1] else None, a, b]
    return found


class _Projected(torch.autograd.Function):
    """One node for all layers of the group."""

    @staticmethod
    def forward(ctx: Any, layers: list[Projection], x: Tensor, *flat: Tensor | None) -> tuple[Tensor, ...]:
        outputs, known = forward(rows(x), layers, chunked(flat))
        ctx.layers = layers
        ctx.save_for_backward(x, *(tensor for each in known for tensor in each), *flat)
        return tuple(each.view(*x.shape[:-1], each.shape[-1]) for each in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        layers, (x, *saved) = ctx.layers, ctx.saved_tensors
        count = 2 * len(layers)
        known = [Known(*saved[i : i + 2]) for i in range(0, count, 2)]
        weights, flat = chunked(saved[count:]), [rows(slope) for slope in slopes]
        inner = into_low_rank(flat, layers, weights, known)
        dx = into_input(flat, inner, layers, weights, known).view_as(x) if ctx.needs_input_grad[1] else None
        wanted = wanted_of(ctx.needs_input_grad[2:])
        return None, dx, *into_weights(rows(x), flat, inner, layers, weights, known, wanted)


def wanted_of(needs: Sequence[bool]) -> list[Wanted]:
    """Which of each projection's four tensors want a gradient."""
    return [(needs[i], needs[i + 1], needs[i + 2], needs[i + 3]) for i in range(0, len(needs), 4)]
