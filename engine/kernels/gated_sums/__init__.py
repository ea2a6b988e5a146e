"""A gated activation of sums: `act(gate + inner_g outer_g^T) * (up + inner_u outer_u^T)` in one launch, gradients in another.

What a gated block with low-rank adapters multiplies are two wide products and two thin ones. Adding the thin ones to the wide
is a pass over 2 x [..., I] for each; here they are formed where the sums are read, and the sums are never written. The gradient
that comes in may be such a sum too. The backward launch can give the product again and write all three over what it read. Sums
are rounded nowhere: they are nearer to exact ones than those of two products added in 16 bits. float64 and what has no kernel get
plain torch.
"""

from __future__ import annotations

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


def _cost(tiles: int) -> Any:
    # Registers of a thread by the elements it holds, from above: float32 tiles that live at once.
    def cost(tile: Tile) -> Cost:
        rows, columns, warps = tile
        return Cost(40 + tiles * (rows * columns // (32 * warps)), 32 * warps, 4 * rows * columns)

    return cost


_TILES = ((32, 128, 4), (64, 64, 4), (64, 128, 8), (32, 128, 8), (32, 64, 4), (16, 256, 4))
FORWARD = Tiles("gated_sums_fwd", 1, ("rows", "columns", "warps"), _TILES, _cost(3))
BACKWARD = Tiles("gated_sums_bwd", 1, ("rows", "columns", "warps"), _TILES, _cost(5))


def gated_sums(
    gate: torch.Tensor, gate_thin: Thin, up: torch.Tensor, up_thin: Thin, activation: str = "silu"
) -> torch.Tensor:
    """`act(gate + inner_g @ outer_g.T) * (up + inner_u @ outer_u.T)`, computed in float32 and rounded once; differentiable.

    Args:
        gate, up: [..., I] of one shape and dtype, float32, float16 or bfloat16.
        gate_thin, up_thin: the factors (inner [..., R], outer [I, R]) of the product that is added, of the same dtype, or None.
        activation: `silu`, `gelu_tanh` or `gelu`.

    Raises:
        ValueError: shapes, formats or devices that do not belong together, or another activation.
    """
    _refuse(gate, gate_thin, up, up_thin, activation)
    out: torch.Tensor = GATED_SUMS(gate, *_pair(gate_thin), up, *_pair(up_thin), activation)
    return out


def _pair(thin: Thin) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (None, None) if thin is None else thin


def _refuse(gate: torch.Tensor, gate_thin: Thin, up: torch.Tensor, up_thin: Thin, activation: str) -> None:
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


def _rows(x: torch.Tensor) -> torch.Tensor:
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


class _Added:
    """A low-rank product as a launch takes it: two tensors, three strides, the rank and what it is rounded up to."""

    def __init__(self, inner: torch.Tensor | None, outer: torch.Tensor | None, nothing: torch.Tensor) -> None:
        if inner is None or outer is None:
            self.tensors, self.strides, self.ranks = (nothing, nothing), (0, 0, 0), (0, 0)
            return
        inner = _rows(inner)
        rank = inner.shape[1]
        self.tensors, self.strides = (inner, outer), (inner.stride(0), *outer.stride())
        self.ranks = rank, max(_LEAST_RANK, bucket(rank))


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
    up: torch.Tensor, up_inner: torch.Tensor | None, up_outer: torch.Tensor | None, activation: str,
) -> torch.Tensor:  # fmt: skip
    if not _served(gate):
        return gated_sums_reference(gate, _thin(gate_inner, gate_outer), up, _thin(up_inner, up_outer), activation)
    from engine.kernels.gated_sums.kernels import gated_sums_fwd_kernel

    wide, other = gate.contiguous().view(-1, gate.shape[-1]), up.contiguous().view(-1, up.shape[-1])
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    first, second = _Added(gate_inner, gate_outer, wide), _Added(up_inner, up_outer, wide)
    rows, columns = wide.shape

    def launch(tile: Tile) -> None:
        gated_sums_fwd_kernel[_grid(rows, columns, tile)](
            wide, *first.tensors, other, *second.tensors, out, *first.strides, *second.strides, rows, columns,
            ACTIVATIONS.index(activation), *first.ranks, *second.ranks, tile[0], tile[1], interpreted(), num_warps=tile[2],
        )  # fmt: skip

    launch(_tile(FORWARD, wide, activation, launch))
    return out


@_gated_sums.register_fake
def _(gate: Any, gate_inner: Any, gate_outer: Any, up: Any, up_inner: Any, up_outer: Any, activation: str) -> Any:
    return gate.new_empty(gate.shape)


@torch.library.custom_op("workbench::gated_sums_backward", mutates_args=())
def _gated_sums_backward(
    grad: torch.Tensor, grad_inner: torch.Tensor | None, grad_right: torch.Tensor | None,
    gate: torch.Tensor, gate_inner: torch.Tensor | None, gate_outer: torch.Tensor | None,
    up: torch.Tensor, up_inner: torch.Tensor | None, up_outer: torch.Tensor | None, activation: str, product: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of gate and up, and with `product` the result itself, else nothing. `grad_right` is [R, I]."""
    dgate, dup = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    again = torch.empty_like(dgate) if product else dgate.new_empty(0)
    _gradients(
        (grad, grad_inner, grad_right), (gate, gate_inner, gate_outer), (up, up_inner, up_outer), activation,
        (dgate, dup, again if product else None),
    )  # fmt: skip
    return dgate, dup, again


@_gated_sums_backward.register_fake
def _(
    grad: Any, grad_inner: Any, grad_right: Any, gate: Any, gate_inner: Any, gate_outer: Any, up: Any, up_inner: Any,
    up_outer: Any, activation: str, product: bool,
) -> Any:  # fmt: skip
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape), gate.new_empty(gate.shape if product else 0)


@torch.library.custom_op("workbench::gated_sums_backward_", mutates_args=("grad", "gate", "up"))
def _gated_sums_backward_in_place(
    grad: torch.Tensor, grad_inner: torch.Tensor | None, grad_right: torch.Tensor | None,
    gate: torch.Tensor, gate_inner: torch.Tensor | None, gate_outer: torch.Tensor | None,
    up: torch.Tensor, up_inner: torch.Tensor | None, up_outer: torch.Tensor | None, activation: str,
) -> None:  # fmt: skip
    """Writes the gradients of gate and up over them, and the result over `grad`."""
    _gradients(
        (grad, grad_inner, grad_right), (gate, gate_inner, gate_outer), (up, up_inner, up_outer), activation,
        (gate, up, grad),
    )  # fmt: skip


GATED_SUMS = torch.ops.workbench.gated_sums.default
GRADIENTS = torch.ops.workbench.gated_sums_backward.default
GRADIENTS_IN_PLACE = torch.ops.workbench.gated_sums_backward_.default
_Sum = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def _gradients(
    grad: _Sum, gate: _Sum, up: _Sum, activation: str,
    wanted: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
) -> None:  # fmt: skip
    """One launch into `wanted`: gradients of gate and up, and the product where a place for it is given."""
    right = None if grad[2] is None else grad[2].t()
    if not _served(gate[0]):
        sums = [
            (_rows(wide), None if inner is None or outer is None else (_rows(inner), outer))
            for wide, inner, outer in ((*grad[:2], right), gate, up)
        ]
        found = gated_sums_gradients_reference(*(part for each in sums for part in each), activation)
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


def _differentiate(ctx: Any, grad: torch.Tensor) -> Any:
    gate, gate_inner, gate_outer, up, up_inner, up_outer = ctx.saved_tensors
    dgate, dup, _ = _gated_sums_backward(
        grad, None, None, gate, gate_inner, gate_outer, up, up_inner, up_outer, ctx.activation, False
    )
    of_gate = _into_factors(dgate, gate_inner, gate_outer)
    return dgate, *of_gate, dup, *_into_factors(dup, up_inner, up_outer), None


def _into_factors(slope: torch.Tensor, inner: torch.Tensor | None, outer: torch.Tensor | None) -> tuple[Any, Any]:
    if inner is None or outer is None:
        return None, None
    flat = slope.reshape(-1, slope.shape[-1])
    return (flat @ outer).view(inner.shape), flat.t() @ inner.reshape(-1, inner.shape[-1])


_gated_sums.register_autograd(_differentiate, setup_context=_remember)
