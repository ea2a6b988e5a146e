"""A gated activation of sums: `act(gate + inner_g outer_g^T) * (up + inner_u outer_u^T)` in one launch, gradients in another.

What a gated block with low-rank adapters multiplies are two wide products and two thin ones. Adding the thin ones to the wide
is a pass over 2 x [..., I] for each; here they are formed where the sums are read, and the sums are never written. What the block's
last adapter takes of the result, and what leads from the gradients into the others' inner products, are formed where these are
written, and the gradient that comes in may be a sum as well. The backward launch gives the result again and can write all
three over what it read. Sums are rounded nowhere: they are nearer to exact ones than those of two products added in 16 bits. float64
and what has no kernel get plain torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from engine.kernels.device import interpreted, kernel_serves, register_limit
from engine.kernels.gated.reference import ACTIVATIONS
from engine.kernels.gated_sums.reference import (
    Thin,
    gated_sums_gradients_reference,
    gated_sums_reference,
    led_inwards,
)
from engine.kernels.shapes import refuse_formats
from engine.kernels.tuner import TUNER, Cost, Tile, Tiles, bucket, limits_of

__all__ = ["GATED_SUMS", "GRADIENTS", "GRADIENTS_IN_PLACE", "Thin", "gated_sums", "gated_sums_reference"]

_LEAST_RANK = 16
"""What a product of tiles takes at least."""


_ENOUGH = 1024
"""Programs that keep a large card busy to the end."""
_FEWEST = 4
"""Steps that hide what the first of them waits for."""


def _cost(passes: int, fixed: int) -> Callable[[Tile], Cost]:
    """`passes`: wide results that a program reads. Registers of a thread, from above: float32 tiles that live at once."""

    def cost(tile: Tile) -> Cost:
        rows, columns, pieces, _, warps, stages, programs = tile
        registers = min(255, fixed + (passes + 2) * (rows * columns // (32 * warps)))
        if programs:
            registers = min(registers, _registers(warps, programs))
        held = stages * pieces * columns * (2 * passes * rows + 96) if stages > 1 else 0
        return Cost(registers, 32 * warps, held + 4 * rows * columns)

    return cost


_NAMES = ("rows", "columns", "pieces", "span", "warps", "stages", "programs")
"""A tile, how many of them lie side by side, how many at most a program takes, its warps, how far ahead it reads, and with how many
others it shares a multiprocessor's registers; 0: as they come."""
FORWARD = Tiles(
    "gated_sums_fwd", 2, _NAMES,
    ((64, 64, 1, 24, 4, 3, 0), (64, 64, 2, 24, 4, 2, 0), (64, 32, 4, 48, 4, 2, 0), (128, 32, 2, 48, 8, 2, 0), (64, 32, 1, 48, 4, 3, 0),
     (64, 64, 1, 24, 4, 1, 0)),
    _cost(2, 80),
)  # fmt: skip
BACKWARD = Tiles(
    "gated_sums_bwd", 2, _NAMES,
    ((64, 32, 2, 48, 4, 2, 4), (64, 32, 4, 48, 4, 2, 3), (128, 32, 2, 48, 8, 2, 2), (64, 32, 1, 48, 4, 3, 4), (64, 64, 1, 24, 4, 2, 0),
     (64, 32, 1, 48, 4, 1, 0)),
    _cost(3, 96),
)  # fmt: skip


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
            self.tensors, self.strides, self.ranks = (nothing, nothing), (0, 0, 0), (0, _LEAST_RANK)
            return
        inner = _rows(inner)
        rank = inner.shape[1]
        self.tensors, self.strides = (inner, outer), (inner.stride(0), outer.stride(0), outer.stride(1))
        self.ranks = rank, _rounded(rank)


def _rounded(rank: int) -> int:
    return max(_LEAST_RANK, bucket(rank))


class _Plan:
    """How a launch goes over [rows, columns]: programs side by side, the steps of each, and what the kernel and the compiler take."""

    def __init__(self, tile: Tile, rows: int, columns: int, ranks: Sequence[int], wide: Sequence[torch.Tensor]) -> None:
        height, width, pieces, span, warps, stages, programs = tile
        groups = -(-columns // (width * pieces))
        self.steps = _steps(groups, span // pieces, -(-rows // height))
        self.parts = -(-groups // self.steps)
        self.grid = (-(-rows // height) * self.parts,)
        one = wide[0].element_size() * width * pieces * (len(wide) * height + sum(ranks))
        room = limits_of(wide[0].device).shared_bytes - 4 * height * width
        stages = max(1, min(stages, room // one))
        even = columns == self.parts * self.steps * width * pieces
        self.sizes = height, width, pieces, stages, even, interpreted()
        self.options = {"num_warps": warps, "num_stages": stages}
        if programs and max(ranks) == _LEAST_RANK:  # larger ones take registers as they come
            self.options |= register_limit(_registers(warps, programs))


@lru_cache(maxsize=1024)
def _steps(groups: int, most: int, rows: int) -> int:
    """Steps of a program over `groups` groups of tiles: about `most`, fewer where rows are few, and such that they come out even
    where that is near."""
    most = min(most, groups, max(_FEWEST, groups * bucket(rows) // _ENOUGH))
    even = [each for each in range(1, groups + 1) if groups % each == 0]
    below, above = max(each for each in even if each <= most), min(each for each in even if each >= most)
    return below if 2 * below > most else above if above <= 2 * most else most


def _registers(warps: int, programs: int) -> int:
    return min(248, (1 << 16) // (32 * warps * programs) // 8 * 8)


def _tile(tiles: Tiles, x: torch.Tensor, kind: str, launch: Any) -> Tile:
    if not TUNER.on:
        return tiles.default
    return TUNER.pick(tiles, (bucket(x.shape[0]), bucket(x.shape[1]), str(x.dtype), kind), x.device, launch)


def _served(x: torch.Tensor) -> bool:
    return kernel_serves(x) and x.dtype != torch.float64 and x.numel() > 0


def _thin(inner: torch.Tensor | None, outer: torch.Tensor | None) -> Thin:
    return None if inner is None or outer is None else (inner, outer)


def _ended(shares: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sum of the programs' shares [parts, rows, R]."""
    from engine.kernels.gated_sums.kernels import gated_sums_end_kernel

    out = torch.empty(shares.shape[1:], dtype=dtype, device=shares.device)
    if not out.numel():
        return out
    block = 1024
    gated_sums_end_kernel[(-(-out.numel() // block),)](shares, out, out.numel(), shares.shape[0], block)
    return out


# The two passes are registered operations, which compiled layers hold as they are.
@torch.library.custom_op("workbench::gated_sums", mutates_args=())
def _gated_sums(
    gate: torch.Tensor, gate_inner: torch.Tensor | None, gate_outer: torch.Tensor | None,
    up: torch.Tensor, up_inner: torch.Tensor | None, up_outer: torch.Tensor | None,
    right: torch.Tensor | None, outer: torch.Tensor | None, activation: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    down = None if right is None else right.t()
    if not _served(gate):
        out = gated_sums_reference(gate, _thin(gate_inner, gate_outer), up, _thin(up_inner, up_outer), activation)
        inner = None if down is None else led_inwards(out, (down, down))
    else:
        out, inner = _forward((gate, gate_inner, gate_outer), (up, up_inner, up_outer), down, activation)
    if inner is None or outer is None:
        return out, out.new_empty(0)
    return out, (inner.view(-1, inner.shape[-1]) @ outer.t()).view(*gate.shape[:-1], outer.shape[0])


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


def _forward(
    gate: _Sum, up: _Sum, down: torch.Tensor | None, activation: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The result, and its product with `down` [I, R] where there is one."""
    from engine.kernels.gated_sums.kernels import gated_sums_fwd_kernel

    wide, other = (x[0].contiguous().view(-1, x[0].shape[-1]) for x in (gate, up))
    out = torch.empty(gate[0].shape, dtype=wide.dtype, device=wide.device)
    first, second = _Added(*gate[1:], wide), _Added(*up[1:], wide)
    rows, columns = wide.shape
    rank = 0 if down is None else down.shape[1]
    shares = wide

    def launch(tile: Tile) -> None:
        nonlocal shares
        plan = _Plan(tile, rows, columns, [first.ranks[1], second.ranks[1], _rounded(rank)], (wide, other))
        if down is not None:
            shares = torch.empty(plan.parts, rows, rank, dtype=torch.float32, device=wide.device)
        gated_sums_fwd_kernel[plan.grid](
            wide, *first.tensors, other, *second.tensors, wide if down is None else down, out, shares,
            *first.strides, *second.strides, *((0, 0) if down is None else down.stride()), rows, columns, plan.steps,
            ACTIVATIONS.index(activation), *first.ranks, *second.ranks, rank, _rounded(rank), *plan.sizes, **plan.options,
        )  # fmt: skip

    launch(_tile(FORWARD, wide, f"{activation}{rank}", launch))
    return out, None if down is None else _ended(shares, wide.dtype)


@torch.library.custom_op("workbench::gated_sums_backward", mutates_args=())
def _gated_sums_backward(
    grad: torch.Tensor, grad_inner: torch.Tensor | None, right: torch.Tensor | None,
    gate: torch.Tensor, gate_inner: torch.Tensor | None, gate_outer: torch.Tensor | None,
    up: torch.Tensor, up_inner: torch.Tensor | None, up_outer: torch.Tensor | None, activation: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of gate and up for `grad + grad_inner @ right`, the result itself where that is a sum, and what leads into the
    factors [rows, R_gate + R_up + R]."""
    dgate, dup = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    product = torch.empty_like(dgate) if right is not None else None
    inwards = _gradients(
        (grad, grad_inner, right), (gate, gate_inner, gate_outer), (up, up_inner, up_outer), activation,
        (dgate, dup, product),
    )  # fmt: skip
    return dgate, dup, dgate.new_empty(0) if product is None else product, inwards


def _led(gate: Any, *inners: Any) -> Any:
    """The form of what leads into these factors. `torch.Size.numel` would make the length a constant of the graph."""
    return gate.new_empty(math.prod(gate.shape[:-1]), sum(0 if x is None else x.shape[-1] for x in inners))


@_gated_sums_backward.register_fake
def _(
    grad: Any, grad_inner: Any, right: Any, gate: Any, gate_inner: Any, gate_outer: Any, up: Any, up_inner: Any,
    up_outer: Any, activation: str,
) -> Any:  # fmt: skip
    wide = [gate.new_empty(gate.shape) for _ in range(2)]
    product = gate.new_empty(0 if right is None else gate.shape)
    return *wide, product, _led(gate, gate_inner, up_inner, grad_inner)


@torch.library.custom_op("workbench::gated_sums_backward_", mutates_args=("grad", "gate", "up"))
def _gated_sums_backward_in_place(
    grad: torch.Tensor, grad_inner: torch.Tensor | None, right: torch.Tensor | None,
    gate: torch.Tensor, gate_inner: torch.Tensor | None, gate_outer: torch.Tensor | None,
    up: torch.Tensor, up_inner: torch.Tensor | None, up_outer: torch.Tensor | None, activation: str,
) -> torch.Tensor:  # fmt: skip
    """The same, written over `gate`, `up` and, where the product is asked for, `grad`."""
    return _gradients(
        (grad, grad_inner, right), (gate, gate_inner, gate_outer), (up, up_inner, up_outer), activation,
        (gate, up, None if right is None else grad),
    )  # fmt: skip


@_gated_sums_backward_in_place.register_fake
def _(
    grad: Any, grad_inner: Any, right: Any, gate: Any, gate_inner: Any, gate_outer: Any, up: Any, up_inner: Any,
    up_outer: Any, activation: str,
) -> Any:  # fmt: skip
    return _led(gate, gate_inner, up_inner, grad_inner)


GATED_SUMS = torch.ops.workbench.gated_sums.default
GRADIENTS = torch.ops.workbench.gated_sums_backward.default
GRADIENTS_IN_PLACE = torch.ops.workbench.gated_sums_backward_.default


def _gradients(
    grad: _Sum, gate: _Sum, up: _Sum, activation: str, wanted: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
) -> torch.Tensor:
    """One launch into `wanted`: gradients of gate and up, and the product where a place for it is given; what leads inwards."""
    right = None if grad[2] is None else grad[2].t()
    if not _served(gate[0]):
        (wide, thin), (x, x_thin), (y, y_thin) = (
            (_rows(wide), None if inner is None or outer is None else (_rows(inner), outer))
            for wide, inner, outer in ((*grad[:2], right), gate, up)
        )
        *found, inwards = gated_sums_gradients_reference(wide, thin, x, x_thin, y, y_thin, activation)
        for place, value in zip(wanted, found, strict=True):
            if place is not None:
                place.copy_(value.view_as(place))
        return inwards
    from engine.kernels.gated_sums.kernels import gated_sums_bwd_kernel

    wides = [x[0].contiguous().view(-1, x[0].shape[-1]) for x in (grad, gate, up)]
    added = _Added(grad[1], right, wides[0]), _Added(*gate[1:], wides[0]), _Added(*up[1:], wides[0])
    # What does not lie in rows is written beside and copied.
    fresh = torch.contiguous_format
    written = [
        wides[0] if x is None else x if x.is_contiguous() else torch.empty_like(x, memory_format=fresh) for x in wanted
    ]
    rows, columns = wides[1].shape
    led = sum(thin.ranks[0] for thin in added)
    shares = wides[0]

    def launch(tile: Tile, places: list[torch.Tensor]) -> None:
        nonlocal shares
        plan = _Plan(tile, rows, columns, [thin.ranks[1] for thin in added], wides)
        shares = torch.empty(plan.parts, rows, led, dtype=torch.float32, device=wides[0].device)
        gated_sums_bwd_kernel[plan.grid](
            *(each for wide, thin in zip(wides, added, strict=True) for each in (wide, *thin.tensors)), *places, shares,
            *(stride for thin in added for stride in thin.strides), rows, columns, plan.steps,
            ACTIVATIONS.index(activation), *(rank for thin in added for rank in thin.ranks), *plan.sizes, **plan.options,
        )  # fmt: skip

    spare = [torch.empty_like(x) for x in written] if TUNER.on else written
    kind = "".join(f" {thin.ranks[0]}" for thin in added)
    launch(_tile(BACKWARD, wides[1], f"{activation}{kind}", lambda tile: launch(tile, spare)), written)
    for place, held in zip(wanted, written, strict=True):
        if place is not None and held is not place:
            place.copy_(held)
    return _ended(shares, wides[1].dtype)


def _remember(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.activation = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, grad: torch.Tensor, behind: torch.Tensor) -> Any:
    gate, gate_inner, gate_outer, up, up_inner, up_outer, right, outer = ctx.saved_tensors
    low = None if outer is None else behind.reshape(-1, behind.shape[-1]) @ outer
    dgate, dup, product, inwards = _gated_sums_backward(
        grad, low, right, gate, gate_inner, gate_outer, up, up_inner, up_outer, ctx.activation
    )
    ranks = [0 if x is None else x.shape[-1] for x in (gate_inner, up_inner, low)]
    of_gate, of_up, inner = inwards.split(ranks, -1)
    of_down: tuple[Any, Any] = None, None
    if low is not None:
        of_down = low.t() @ product.view(-1, product.shape[-1]), behind.reshape(-1, behind.shape[-1]).t() @ inner
    return (
        dgate, *_into_factors(dgate, of_gate, gate_inner), dup, *_into_factors(dup, of_up, up_inner), *of_down, None,
    )  # fmt: skip


def _into_factors(slope: torch.Tensor, inwards: torch.Tensor, inner: torch.Tensor | None) -> tuple[Any, Any]:
    """Gradients of the two factors that a sum was given."""
    if inner is None:
        return None, None
    return inwards.view(inner.shape), slope.reshape(-1, slope.shape[-1]).t() @ inner.reshape(-1, inner.shape[-1])


_gated_sums.register_autograd(_differentiate, setup_context=_remember)
