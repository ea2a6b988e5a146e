"""A gated activation of sums: `act(gate + inner_g outer_g^T) * (up + inner_u outer_u^T)` in one launch, gradients in another.

What a gated block with low-rank adapters multiplies are two wide products and two thin ones. Adding the thin ones to the wide
is a pass over 2 x [..., I] for each; here they are formed where the sums are read, and the sums are never written. The gradient that
comes in may be such a sum too. The backward launch gives the product again and can write all three over what it read. Sums
are rounded nowhere: they are nearer to exact ones than those of two products added in 16 bits. float64 and what has no kernel get
plain torch.

What adapters take of the product, and of its gradients, are products of their own: forming them in the same launches took a loop
over columns, and the backward one 0.9 ms in place of a third of that and two times 0.05 (H200, [8192, 12288], rank 16).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from engine.kernels.device import interpreted, kernel_serves
from engine.kernels.gated.reference import ACTIVATIONS
from engine.kernels.gated_sums.reference import Thin, gated_sums_gradients_reference, gated_sums_reference
from engine.kernels.shapes import refuse_formats
from engine.kernels.tuner import TUNER, Cost, Tile, Tiles, bucket

__all__ = ["GATED_SUMS", "GRADIENTS", "GRADIENTS_IN_PLACE", "Thin", "gated_sums", "gated_sums_reference"]

_LEAST_RANK = 16
"""What a product of tiles takes at least."""


def _cost(tiles: int) -> Callable[[Tile], Cost]:
    # Registers of a thread by the elements it holds, from above: float32 tiles that live at once.
    def cost(tile: Tile) -> Cost:
        rows, columns, warps = tile
        return Cost(48 + tiles * (rows * columns // (32 * warps)), 32 * warps, 4 * rows * columns)

    return cost


_NAMES = ("rows", "columns", "warps")
_TILES = (
    (32, 128, 8), (32, 64, 4), (32, 128, 4), (64, 64, 4), (64, 64, 8), (64, 128, 8), (32, 256, 8), (16, 128, 4), (64, 32, 4),
)  # fmt: skip
FORWARD = Tiles("gated_sums_fwd", 1, _NAMES, _TILES, _cost(3))
BACKWARD = Tiles("gated_sums_bwd", 1, _NAMES, _TILES, _cost(5))


def gated_sums(
    gate: torch.Tensor, gate_thin: Thin, up: torch.Tensor, up_thin: Thin, activation: str = "silu", down: Thin = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`h = act(gate + inner_g @ outer_g.T) * (up + inner_u @ outer_u.T)`, computed in float32 and rounded once, and what a
    low-rank layer behind it answers, `h @ right.T @ outer.T`; differentiable.

    Args:
        gate, up: [..., I] of one shape and dtype, float32, float16 or bfloat16.
        gate_thin, up_thin: the factors (inner [..., R], outer [I, R]) of the product that is added, of the same dtype, or None.
        activation: `silu`, `gelu_tanh` or `gelu`.
        down: the matrices (right [R, I], outer [O, R]) of the layer behind, of the same dtype, or None.

    Returns:
        h [..., I], and [..., O] or None.

    Raises:
        ValueError: shapes, formats or devices that do not belong together, or another activation.
    """
    _refuse(gate, gate_thin, up, up_thin, activation, down)
    out, answer = GATED_SUMS(gate, *_pair(gate_thin), up, *_pair(up_thin), *_pair(down), activation)
    return out, None if down is None else answer


def _pair(thin: Thin) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (None, None) if thin is None else thin


def _refuse(gate: torch.Tensor, gate_thin: Thin, up: torch.Tensor, up_thin: Thin, activation: str, down: Thin) -> None:
    if gate.shape != up.shape or gate.dtype != up.dtype or not gate.dim():
        given = f"{tuple(gate.shape)} {gate.dtype} and {tuple(up.shape)} {up.dtype}"
        raise ValueError(f"gated_sums: gate and up must have one shape [..., I] and number format; got {given}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"gated_sums: activation must be one of {', '.join(ACTIVATIONS)}; got {activation!r}")
    refuse_formats("gated_sums", gate=gate, up=up)
    for name, thin in (("gate", gate_thin), ("up", up_thin)):
        if thin is None:
            continue
        inner, outer = thin
        wanted = inner.shape[:-1] == gate.shape[:-1] and outer.shape == (gate.shape[-1], inner.shape[-1])
        if not wanted or {inner.dtype, outer.dtype} != {gate.dtype}:
            raise ValueError(
                f"gated_sums: {name}'s factors must be [..., R] and [I, R] in {gate.dtype} beside {tuple(gate.shape)}; "
                f"got {tuple(inner.shape)} {inner.dtype} and {tuple(outer.shape)} {outer.dtype}"
            )
    if down is not None:
        right, outer = down
        if right.dim() != 2 or right.shape[1] != gate.shape[-1] or outer.shape[1:] != right.shape[:1]:
            raise ValueError(
                f"gated_sums: down's matrices must be [R, I] and [O, R] beside {tuple(gate.shape)}; "
                f"got {tuple(right.shape)} and {tuple(outer.shape)}"
            )


def _rows(x: torch.Tensor) -> torch.Tensor:
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


class _Added:
    """A low-rank product as a launch takes it: two tensors, their strides, the rank and what it is rounded up to."""

    def __init__(self, inner: torch.Tensor | None, outer: torch.Tensor | None, nothing: torch.Tensor) -> None:
        if inner is None or outer is None:
            self.tensors, self.strides, self.ranks = (nothing, nothing), (0, 0, 0), (0, 0)
            return
        inner = _rows(inner)
        rank = inner.shape[1]
        self.tensors, self.strides = (inner, outer), (inner.stride(0), outer.stride(0), outer.stride(1))
        self.ranks = rank, _rounded(rank)


def _rounded(rank: int) -> int:
    return max(_LEAST_RANK, bucket(rank))


def _grid(rows: int, columns: int, tile: Tile) -> tuple[int]:
    return (-(-rows // tile[0]) * -(-columns // tile[1]),)


def _tile(tiles: Tiles, x: torch.Tensor, kind: str, launch: Any) -> Tile:
    if not TUNER.on:
        return tiles.default
    return TUNER.pick(tiles, (bucket(x.shape[0]), bucket(x.shape[1]), str(x.dtype), kind), x.device, launch)


def _served(x: torch.Tensor) -> bool:
    return kernel_serves(x) and x.dtype != torch.float64 and x.numel() > 0


def _thin(inner: torch.Tensor | None, outer: torch.Tensor | None) -> Thin:
    return None if inner is None or outer is None else (inner, outer)


# The two passes are registered operations, which compiled layers hold as they are.
@torch.library.custom_op("workbench::gated_sums", mutates_args=())
def _gated_sums(
    gate: torch.Tensor, gate_inner: torch.Tensor | None, gate_outer: torch.Tensor | None,
    up: torch.Tensor, up_inner: torch.Tensor | None, up_outer: torch.Tensor | None,
    right: torch.Tensor | None, outer: torch.Tensor | None, activation: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    if _served(gate):
        out = _forward((gate, gate_inner, gate_outer), (up, up_inner, up_outer), activation)
    else:
        out = gated_sums_reference(gate, _thin(gate_inner, gate_outer), up, _thin(up_inner, up_outer), activation)
    if right is None or outer is None:
        return out, out.new_empty(0)
    answer = out.view(-1, out.shape[-1]) @ right.t() @ outer.t()
    return out, answer.view(*gate.shape[:-1], outer.shape[0])


@_gated_sums.register_fake
def _(
    gate: Any,
    gate_inner: Any,
    gate_outer: Any,
    up: Any,
    up_inner: Any,
    up_outer: Any,
    right: Any,
    outer: Any,
    activation: str,
) -> Any:
    behind = gate.new_empty(0) if outer is None else gate.new_empty(*gate.shape[:-1], outer.shape[0])
    return gate.new_empty(gate.shape), behind


_Sum = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def _forward(gate: _Sum, up: _Sum, activation: str) -> torch.Tensor:
    from engine.kernels.gated_sums.kernels import gated_sums_fwd_kernel

    wide, other = (x[0].contiguous().view(-1, x[0].shape[-1]) for x in (gate, up))
    out = torch.empty(gate[0].shape, dtype=wide.dtype, device=wide.device)
    first, second = _Added(*gate[1:], wide), _Added(*up[1:], wide)
    rows, columns = wide.shape

    def launch(tile: Tile) -> None:
        gated_sums_fwd_kernel[_grid(rows, columns, tile)](
            wide, *first.tensors, other, *second.tensors, out, *first.strides, *second.strides, rows, columns,
            ACTIVATIONS.index(activation), *first.ranks, *second.ranks, tile[0], tile[1], interpreted(), num_warps=tile[2],
        )  # fmt: skip

    launch(_tile(FORWARD, wide, activation, launch))
    return out


@torch.library.custom_op("workbench::gated_sums_backward", mutates_args=())
def _gated_sums_backward(
    grad: torch.Tensor, grad_inner: torch.Tensor | None, right: torch.Tensor | None,
    gate: torch.Tensor, gate_inner: torch.Tensor | None, gate_outer: torch.Tensor | None,
    up: torch.Tensor, up_inner: torch.Tensor | None, up_outer: torch.Tensor | None, activation: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of gate and up for `grad + grad_inner @ right`, and the result itself where that is a sum: there an adapter
    learns from it."""
    dgate, dup = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    product = torch.empty_like(dgate) if right is not None else None
    _gradients(
        (grad, grad_inner, right), (gate, gate_inner, gate_outer), (up, up_inner, up_outer), activation,
        (dgate, dup, product),
    )  # fmt: skip
    return dgate, dup, dgate.new_empty(0) if product is None else product


@_gated_sums_backward.register_fake
def _(
    grad: Any, grad_inner: Any, right: Any, gate: Any, gate_inner: Any, gate_outer: Any, up: Any, up_inner: Any,
    up_outer: Any, activation: str,
) -> Any:  # fmt: skip
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape), gate.new_empty(0 if right is None else gate.shape)


@torch.library.custom_op("workbench::gated_sums_backward_", mutates_args=("grad", "gate", "up"))
def _gated_sums_backward_in_place(
    grad: torch.Tensor, grad_inner: torch.Tensor | None, right: torch.Tensor | None,
    gate: torch.Tensor, gate_inner: torch.Tensor | None, gate_outer: torch.Tensor | None,
    up: torch.Tensor, up_inner: torch.Tensor | None, up_outer: torch.Tensor | None, activation: str,
) -> None:  # fmt: skip
    """The same, written over `gate`, `up` and, where the product is asked for, `grad`."""
    _gradients(
        (grad, grad_inner, right), (gate, gate_inner, gate_outer), (up, up_inner, up_outer), activation,
        (gate, up, None if right is None else grad),
    )  # fmt: skip


GATED_SUMS = torch.ops.workbench.gated_sums.default
GRADIENTS = torch.ops.workbench.gated_sums_backward.default
GRADIENTS_IN_PLACE = torch.ops.workbench.gated_sums_backward_.default


def _gradients(
    grad: _Sum, gate: _Sum, up: _Sum, activation: str, wanted: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
) -> None:
    """One launch into `wanted`: gradients of gate and up, and the product where a place for it is given."""
    right = None if grad[2] is None else grad[2].t()
    if not _served(gate[0]):
        (wide, thin), (x, x_thin), (y, y_thin) = (
            (_rows(wide), None if inner is None or outer is None else (_rows(inner), outer))
            for wide, inner, outer in ((*grad[:2], right), gate, up)
        )
        found = gated_sums_gradients_reference(wide, thin, x, x_thin, y, y_thin, activation)
        for place, value in zip(wanted, found, strict=True):
            if place is not None:
                place.copy_(value.view_as(place))
        return
    from engine.kernels.gated_sums.kernels import gated_sums_bwd_kernel

    wides = [x[0].contiguous().view(-1, x[0].shape[-1]) for x in (grad, gate, up)]
    added = _Added(grad[1], right, wides[0]), _Added(*gate[1:], wides[0]), _Added(*up[1:], wides[0])
    # What does not lie in rows is written beside and copied.
    fresh = torch.contiguous_format
    written = [
        wides[0] if x is None else x if x.is_contiguous() else torch.empty_like(x, memory_format=fresh) for x in wanted
    ]
    rows, columns = wides[1].shape

    def launch(tile: Tile, places: list[torch.Tensor]) -> None:
        gated_sums_bwd_kernel[_grid(rows, columns, tile)](
            *(each for wide, thin in zip(wides, added, strict=True) for each in (wide, *thin.tensors)), *places,
            *(stride for thin in added for stride in thin.strides), rows, columns,
            ACTIVATIONS.index(activation), wanted[2] is not None, *(rank for thin in added for rank in thin.ranks),
            tile[0], tile[1], interpreted(), num_warps=tile[2],
        )  # fmt: skip

    spare = [torch.empty_like(x) for x in written] if TUNER.on else written
    tile = _tile(BACKWARD, wides[1], f"{activation}{int(wanted[2] is not None)}", lambda tile: launch(tile, spare))
    launch(tile, written)
    for place, held in zip(wanted, written, strict=True):
        if place is not None and held is not place:
            place.copy_(held)


def _remember(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.activation = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, grad: torch.Tensor, behind: torch.Tensor) -> Any:
    gate, gate_inner, gate_outer, up, up_inner, up_outer, right, outer = ctx.saved_tensors
    low = None if outer is None else behind.reshape(-1, behind.shape[-1]) @ outer
    dgate, dup, product = _gated_sums_backward(
        grad, low, right, gate, gate_inner, gate_outer, up, up_inner, up_outer, ctx.activation
    )
    of_down: tuple[Any, Any] = None, None
    if low is not None:
        flat = product.view(-1, product.shape[-1])
        of_down = low.t() @ flat, behind.reshape(-1, behind.shape[-1]).t() @ (flat @ right.t())
    of_gate, of_up = _into_factors(dgate, gate_inner, gate_outer), _into_factors(dup, up_inner, up_outer)
    return dgate, *of_gate, dup, *of_up, *of_down, None


def _into_factors(slope: torch.Tensor, inner: torch.Tensor | None, outer: torch.Tensor | None) -> tuple[Any, Any]:
    """Gradients of the two factors that a sum was given."""
    if inner is None or outer is None:
        return None, None
    flat = slope.reshape(-1, slope.shape[-1])
    return (flat @ outer).view(inner.shape), flat.t() @ inner.reshape(-1, inner.shape[-1])


_gated_sums.register_autograd(_differentiate, setup_context=_remember)
