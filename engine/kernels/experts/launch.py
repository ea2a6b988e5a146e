"""The launches of both passes: a plan of the rows, then products of all experts at once.

Forward: `x A.T` of the adapters, gate and up with what goes down of them, down by slot, the sum of each token's slots.
Backward: the same two products transposed, with the gate's derivatives and the routing weights' gradients at the end of
the first, then grouped Gram products for what trains. What went down is formed again from gate and up.
Of packed projections a product is launched for some experts at a time, unpacked before it, over the same plan.
Names: T tokens, S slots (T times top-k), E experts, H hidden, I intermediate, r rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.kernels.device import interpreted, kernel_serves, register_limit
from engine.kernels.experts.packed import PackedExperts
from engine.kernels.experts.reference import ACTIVATIONS, Gate
from engine.kernels.tuner import TUNER, Cost, Key, Tile, Tiles, bucket, limits_of

RUN, BLOCK = 128, 512
"""Slots that one program puts in their places, and that one program counts."""
DECODED = ("nf4", "fp4", "mxfp4", "nvfp4", "fp8")
"""Kinds that products decode inside."""
AHEAD = False
"""Whether the next experts are unpacked beside a product without that having been timed."""
REGISTERS = 192
"""What a thread of a product takes at most, so that programs that unpack find room beside it."""
DECODED_ROWS = 128
"""Rows that an expert of four bits has on average up to which they do so without having been timed."""


class Plan(NamedTuple):
    """Where rows are: `order` [S] the slot of each, `starts` [E + 1], and of each tile its expert and first row."""

    order: Tensor
    starts: Tensor
    tile_expert: Tensor
    tile_row: Tensor

    @property
    def tiles(self) -> int:
        return self.tile_expert.shape[0]


class Weights(NamedTuple):
    """All that experts hold: projections [E, out, in], biases [E, out], adapters A [E, r, in] and B, turned, [E, r, out]."""

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    gate_up_a: Tensor | None = None
    gate_up_b: Tensor | None = None
    down_a: Tensor | None = None
    down_b: Tensor | None = None


class Settings(NamedTuple):
    """The gate, and the adapters' scales."""

    gate: Gate
    gate_up_scale: float = 1.0
    down_scale: float = 1.0


class Kept(NamedTuple):
    """What the backward pass needs of the forward one: gate and up [S, 2 I] by row, and what the adapters made [S, r]."""

    plan: Plan
    both: Tensor
    gate_up_inner: Tensor | None
    down_inner: Tensor | None


def _cost(shares: int) -> Any:
    """What tiles of 128 rows and `shares` runs of columns ask for: accumulators, and the tiles that wait in shared memory."""

    def cost(tile: Tile) -> Cost:
        columns, depth, warps, stages, _ = tile
        return Cost(4 * columns * shares // warps + 64, 32 * warps, stages * 2 * depth * (128 + columns * shares))

    return cost


_NAMES = ("columns", "depth", "warps", "stages", "tma")
# The first that fits a card is taken: what waits in shared memory hides the way from L2, which is the limit (H100).
UP = Tiles(
    "experts_up", 1, _NAMES, ((128, 64, 8, 4, 1), (128, 64, 8, 3, 1), (64, 64, 4, 3, 0), (64, 32, 4, 3, 0)), _cost(2)
)
PRODUCT = Tiles(
    "experts_product",
    1,
    _NAMES,
    ((256, 64, 8, 4, 1), (256, 64, 8, 3, 1), (128, 64, 4, 3, 0), (128, 32, 4, 3, 0)),
    _cost(1),
)


_NOT_PACKED: dict[str, Any] = {"PACKED": "", "BLOCK": 1, "SCALE_BLOCK": 1, "LANES": False}
# Two programs on a multiprocessor, so that one decodes while the other multiplies (H100).
UP_DECODED = Tiles(
    "experts_up_decoded", 1, _NAMES,
    ((64, 64, 4, 3, 0), (64, 64, 4, 4, 0), (32, 128, 4, 4, 0), (64, 64, 8, 3, 0)), _cost(2),
)  # fmt: skip
PRODUCT_DECODED = Tiles(
    "experts_product_decoded", 1, _NAMES,
    ((128, 64, 4, 3, 0), (128, 64, 4, 4, 0), (64, 128, 4, 4, 0), (128, 128, 4, 3, 0), (128, 64, 8, 3, 0), (64, 64, 4, 4, 0)), _cost(1),
)  # fmt: skip


@cache
def for_card(tiles: Tiles, device: torch.device) -> Tiles:
    """The tiles that a card has room for, the fastest by hand first; all where there is no card."""
    if device.type != "cuda":
        return tiles
    limits = limits_of(device)
    return replace(tiles, candidates=tuple(tile for tile in tiles.candidates if limits.allow(tiles.cost(tile))))


def serves(x: Tensor, expert_ids: Tensor) -> bool:
    """Whether the kernels take these tokens; the reference serves all."""
    return kernel_serves(x) and x.dtype != torch.float64 and expert_ids.numel() > 0


def rows_of_a_tile(slots: int, experts: int) -> int:
    """As many rows as an expert gets on average, between 16 and 128, a power of two.

    By comparisons alone: a graph for batches of any length asks this of a length that has no number yet.
    """
    if interpreted():
        return 16
    average = -(-slots // max(experts, 1))
    return 16 if average <= 16 else 32 if average <= 32 else 64 if average <= 64 else 128


def tiles_at_most(slots: int, experts: int, rows: int) -> int:
    """How many tiles of `rows` there can be, however the slots are spread."""
    return min(slots, slots // rows + min(experts, slots))


def prepared(
    x: Tensor, ids: Tensor, routing_weights: Tensor, weights: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor, Tensor, Weights]:
    """What the launches take: adapters in x's format, B [E, out, r] turned, and each expert's in one piece."""
    gate_up, down, *biases = weights[:4]
    assert gate_up is not None
    assert down is not None
    adapters = (
        None if each is None else (each.transpose(1, 2) if i % 2 else each).to(x.dtype).contiguous()
        for i, each in enumerate(weights[4:])
    )
    held = Weights(gate_up, down, *(None if each is None else each.contiguous() for each in biases), *adapters)
    return x if x.stride(-1) == 1 else x.contiguous(), ids.contiguous(), routing_weights.contiguous(), held


def formats_of(weights: Sequence[Tensor | None]) -> tuple[torch.dtype | None, ...]:
    """The number formats in which these train."""
    return tuple(None if each is None else each.dtype for each in weights)


def planned(expert_ids: Tensor, experts: int, rows: int) -> Plan:
    """The plan for ids [T, k], made on the device; an id outside of [0, experts) gets no row."""
    from engine.kernels.experts.kernels import count_kernel, place_kernel, plan_kernel

    ids = expert_ids.reshape(-1)
    slots, device = ids.numel(), ids.device
    tiles = tiles_at_most(slots, experts, rows)
    runs, bins, programs = -(-slots // BLOCK), max(bucket(experts), 32), -(-slots // RUN)
    each = -(-tiles // (programs * 16)) * 16
    counts, before = (torch.empty(runs, experts, dtype=torch.int32, device=device) for _ in range(2))
    starts = torch.empty(experts + 1, dtype=torch.int32, device=device)
    ends = torch.empty(experts, dtype=torch.int32, device=device)
    order = torch.empty(slots, dtype=torch.int32, device=device)
    owners, firsts = (torch.empty(tiles, dtype=torch.int32, device=device) for _ in range(2))
    count_kernel[(runs,)](ids, counts, slots, experts, BINS=bins, BLOCK=BLOCK, num_warps=4)
    chunk = max(min(4096 // bins, bucket(runs)), 1)
    plan_kernel[(1,)](counts, before, starts, ends, runs, experts, BINS=bins, CHUNK=chunk, ROWS=rows, num_warps=8)
    place_kernel[(programs,)](
        ids, before, starts, ends, order, owners, firsts, slots, experts, tiles, each,
        BINS=bins, BLOCK=BLOCK, RUN=RUN, TILES=16, ROWS=rows, num_warps=8,
    )  # fmt: skip
    return Plan(order, starts, owners, firsts)


def forward(
    x: Tensor, expert_ids: Tensor, routing_weights: Tensor, weights: Weights, settings: Settings
) -> tuple[Tensor, Kept]:
    """The result [T, H] and what is kept; all tensors in one number format but routing weights and biases."""
    tokens, top_k = expert_ids.shape
    experts, twice, _ = weights.gate_up.shape
    slots, width = tokens * top_k, twice // 2
    rows = rows_of_a_tile(slots, experts)
    plan = planned(expert_ids, experts, rows)
    inner = None
    if weights.gate_up_a is not None:
        inner = _inner(x, weights.gate_up_a, settings.gate_up_scale, plan, rows, top_k)[0]
    both, h = x.new_empty(slots, twice), x.new_empty(slots, width)
    _up(x, weights, inner, plan, rows, top_k, settings.gate, both, h)
    down_inner = None
    if weights.down_a is not None:
        down_inner = _inner(h, weights.down_a, settings.down_scale, plan, rows, 0)[0]
    by_slot = _product(
        h, weights.down, weights.down_bias, down_inner, _turned(weights.down_b), plan, rows, routing_weights
    )
    del h
    return _combined(by_slot, expert_ids, experts), Kept(plan, both, inner, down_inner)


class Wanted(NamedTuple):
    """Which gradients are asked for, those of the weights in the formats in which they train."""

    x: bool = True
    routing_weights: bool = True
    weights: tuple[bool, ...] = (False,) * 8
    formats: tuple[torch.dtype | None, ...] = (None,) * 8


def backward(
    dy: Tensor,
    x: Tensor,
    expert_ids: Tensor,
    routing_weights: Tensor,
    weights: Weights,
    settings: Settings,
    kept: Kept,
    wanted: Wanted,
) -> tuple[Tensor | None, Tensor | None, list[Tensor | None]]:
    """Gradients of x, of the routing weights, and of each of the weights in order; None where not wanted."""
    tokens, top_k = expert_ids.shape
    experts = weights.gate_up.shape[0]
    plan, rows = kept.plan, rows_of_a_tile(tokens * top_k, experts)
    want = {name for name, asked in zip(Weights._fields, wanted.weights, strict=True) if asked}
    dy = dy.contiguous()
    d_inner, dots = None, None
    if weights.down_b is not None or weights.down_bias is not None:
        bias = weights.down_bias if wanted.routing_weights else None
        d_inner, dots = _inner(dy, weights.down_b, settings.down_scale, plan, rows, top_k, bias)
    h = _product(
        dy, weights.down.transpose(1, 2), None, d_inner, _turned(weights.down_a), plan, rows, top_k=top_k, by_slot=False
    )
    d_both = torch.empty_like(kept.both)
    with_h = bool(want & {"down", "down_a"})
    d_routing = _gate_backward(h, dots, kept.both, d_both, plan, settings.gate, routing_weights, with_h)
    found: list[Tensor | None] = [None] * 8

    def gram(place: int, left: Tensor | None, right: Tensor | None, like: Tensor | None, **how: Any) -> None:
        """The gradient of the weight in this place, where it is wanted."""
        if wanted.weights[place]:
            found[place] = _gram(left, right, like, plan, top_k, dtype=wanted.formats[place], **how)

    gram(6, h, d_inner, weights.down_a, transposed=True, weights=routing_weights)
    gram(1, h, dy, weights.down, right_gathered=True, transposed=True, weights=routing_weights)
    del h, d_inner
    gram(7, dy, kept.down_inner, _turned(weights.down_b), left_gathered=True, weights=routing_weights)
    ones = x.new_ones(plan.order.shape[0], 1) if want & {"down_bias", "gate_up_bias"} else None
    gram(3, dy, ones, _column(weights.down_bias), left_gathered=True, weights=routing_weights)
    gram(0, d_both, x, weights.gate_up, right_gathered=True)
    gram(2, d_both, ones, _column(weights.gate_up_bias))
    gram(5, d_both, kept.gate_up_inner, _turned(weights.gate_up_b))
    d_inner = None
    if weights.gate_up_b is not None and (wanted.x or "gate_up_a" in want):
        d_inner = _inner(d_both, weights.gate_up_b, settings.gate_up_scale, plan, rows, 0)[0]
    gram(4, x, d_inner, weights.gate_up_a, left_gathered=True, transposed=True)
    for place in (2, 3):
        if (column := found[place]) is not None:
            found[place] = column.squeeze(2)
    dx = None
    if wanted.x:
        turned, a = weights.gate_up.transpose(1, 2), _turned(weights.gate_up_a)
        by_slot = _product(d_both, turned, None, d_inner, a, plan, rows, None)
        del d_both
        dx = _combined(by_slot, expert_ids, experts)
    return dx, d_routing if wanted.routing_weights else None, found


def _precision(x: Tensor) -> str:
    if interpreted():
        return "widened"
    return "tf32x3" if x.dtype == torch.float32 else "ieee"


def far(*tensors: Tensor | None) -> bool:
    """Whether some number of these lies 2^31 or more from the first, beyond what offsets of 32 bits reach."""
    return any(
        sum((size - 1) * step for size, step in zip(each.shape, each.stride(), strict=True)) >= 2**31
        for each in tensors
        if each is not None
    )


def _rank(rank: int) -> int:
    return max(bucket(rank), 16)


def _capped(tile: Tile, x: Tensor, rows: int, columns: int, depth: int) -> Tile:
    """The tile for a problem that is smaller than it, or of wider numbers."""
    wide, deep, warps, stages, tma = tile
    if x.dtype == torch.float32:
        wide, deep, stages = max(wide // 2, 16), max(deep // 2, 16), min(stages, 2)
    if interpreted():
        wide, deep = min(wide, 32), min(deep, 32)
    wide, deep = min(wide, max(bucket(columns), 16)), min(deep, max(bucket(depth), 16))
    if rows < 64:
        warps = min(warps, 4)
    return wide, deep, warps, stages, tma


def copies_tiles(device: torch.device) -> bool:
    """Whether the card copies whole tiles by itself (TMA)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def _operand(
    weight: Tensor, columns: int, deep: int, tma: int, halves: bool = False
) -> tuple[Any, dict[str, Any], list[int]]:
    """An [E, N, K] weight for a kernel: pointer, descriptor or packed parts, its flags, and rows a matrix, strides of E, N and K."""
    _, n, k = weight.shape
    if isinstance(weight, PackedExperts):
        from engine.kernels.experts.unpack import in_lanes_of, pointers

        form = weight.form
        packed = {
            "PACKED": form.kind,
            "BLOCK": form.block,
            "SCALE_BLOCK": form.scale_block,
            "LANES": in_lanes_of(form.kind),
        }
        flags = {"EVEN": True, "FULL": n % columns == 0, "BY_COLUMN": not form.turned, "TMA": False, **packed}
        # As the one that unpacks rounds, so does this.
        return pointers(weight.held), {**flags, "enable_fp_fusion": False}, [0, 0, 0, 0]
    by_column = weight.stride(2) == 1
    rows, line, row = (n, k, weight.stride(1)) if by_column else (k, n, weight.stride(2))
    strides = [rows, weight.stride(0), weight.stride(1), weight.stride(2)]
    flags = {"EVEN": k % deep == 0, "FULL": n % columns == 0, "BY_COLUMN": by_column, "TMA": False, **_NOT_PACKED}
    size = weight.element_size()
    whole = min(weight.stride(1), weight.stride(2)) == 1 and weight.stride(0) == rows * row
    fits = whole and row * size % 16 == 0 and weight.data_ptr() % 16 == 0 and weight.numel() > 0
    if not (tma and fits and k % deep == 0 and (by_column or not halves) and copies_tiles(weight.device)):
        return weight, flags, strides
    from triton.tools.tensor_descriptor import TensorDescriptor

    flags["TMA"] = True
    if halves:
        shape, steps = [weight.shape[0], 2, n // 2, k], [weight.stride(0), n // 2 * row, row, 1]
        return TensorDescriptor(weight, shape, steps, [1, 2, columns, deep]), flags, strides
    block = [columns, deep] if by_column else [deep, columns]
    return TensorDescriptor(weight, [weight.shape[0] * rows, line], [row, 1], block), flags, strides


def _inner(
    x: Tensor, a: Tensor | None, scale: float, plan: Plan, rows: int, top_k: int, bias: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """`scale * x @ A_e.T` [S, r] for A [E, r, K], and with a bias [E, K] its product with each row by slot [S].

    `top_k` is 0 where x is in the order of rows already.
    """
    from engine.kernels.experts.kernels import inner_kernel

    slots, depth = plan.order.shape[0], x.shape[-1]
    rank = 0 if a is None else a.shape[1]
    out = x.new_empty(slots, rank)
    dots = torch.empty(slots if bias is not None else 0, dtype=torch.float32, device=x.device)
    given, experts = x if a is None else a, plan.starts.shape[0] - 1
    deep = min(128 if x.element_size() == 2 else 32, max(bucket(depth), 16))
    parts = max(rows // 64, 1)
    strides = (0, 0, 0) if a is None else a.stride()
    inner_kernel[(plan.tiles * parts,)](
        x, given, x if bias is None else bias, plan.order, plan.tile_expert, plan.tile_row, plan.starts, out, dots,
        experts, depth, rank, max(top_k, 1), x.stride(0), *strides, scale,
        GATHERED=top_k > 0, HAS_BIAS=bias is not None, EVEN=depth % deep == 0,
        PARTS=parts, ROWS=rows // parts, RANK=_rank(rank), DEPTH=deep, WIDE=far(x, a, bias, out),
        PRECISION=_precision(x), num_warps=4, num_stages=3,
    )  # fmt: skip
    return None if a is None else out, None if bias is None else dots


def _up(
    x: Tensor, weights: Weights, inner: Tensor | None, plan: Plan, rows: int, top_k: int, gate: Gate,
    both: Tensor, h: Tensor,
) -> None:  # fmt: skip
    from engine.kernels.experts.kernels import up_kernel

    _, twice, depth = weights.gate_up.shape
    width = twice // 2
    b = _turned(weights.gate_up_b)
    wide = far(x, weights.gate_up_bias, inner, b, both, h)

    def launch(weight: Tensor, opens: int, told: dict[str, int], tile: Tile) -> None:
        columns, deep, warps, stages, tma = _capped(tile, x, rows, width, depth)
        taken = 2 * columns if gate.interleaved else columns
        operand, flags, strides = _operand(weight, taken, deep, tma, not gate.interleaved)
        flags["FULL"] = width % columns == 0
        up_kernel[(plan.tiles * -(-width // columns),)](
            x, operand, _or(weights.gate_up_bias, x), _or(inner, x), _or(b, x), plan.order, plan.tile_expert,
            plan.tile_row, plan.starts, both, h,
            opens, opens + len(weight), plan.tiles, depth, width, top_k, x.stride(0), *strides, *_lora(inner, b), gate.limit, gate.alpha,
            HAS_BIAS=weights.gate_up_bias is not None, RANK=0 if inner is None else _rank(inner.shape[1]),
            ACTIVATION=ACTIVATIONS.index(gate.activation), INTERLEAVED=gate.interleaved, **flags,
            GROUP=8, ROWS=rows, COLUMNS=columns, DEPTH=deep, WIDE=wide or far(weight), PRECISION=_precision(x), num_warps=warps,
            num_stages=stages, **told,
        )  # fmt: skip

    _launch_all(UP, x, plan, weights.gate_up, rows, launch, not gate.interleaved)


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, inner: Tensor | None, b: Tensor | None, plan: Plan, rows: int,
    routing_weights: Tensor | None = None, *, top_k: int = 0, by_slot: bool = True,
) -> Tensor:  # fmt: skip
    """Rows x [S, K] through a weight [E, N, K], and an adapter's second matrix [E, N, r], by slot [S, N] or by row.

    With `top_k` x holds tokens.
    """
    from engine.kernels.experts.kernels import product_kernel

    _, width, depth = weight.shape
    out = x.new_empty(plan.order.shape[0], width)
    wide = far(x, bias, inner, b, out)

    def launch(some: Tensor, opens: int, told: dict[str, int], tile: Tile) -> None:
        columns, deep, warps, stages, tma = _capped(tile, x, rows, width, depth)
        operand, flags, strides = _operand(some, columns, deep, tma)
        product_kernel[(plan.tiles * -(-width // columns),)](
            x, operand, _or(bias, x), _or(inner, x), _or(b, x), plan.order, plan.tile_expert, plan.tile_row,
            plan.starts, _or(routing_weights, x), out,
            opens, opens + len(some), plan.tiles, depth, width, max(top_k, 1), x.stride(0), *strides, *_lora(inner, b),
            HAS_BIAS=bias is not None, WEIGHTED=routing_weights is not None, GATHERED=top_k > 0, BY_SLOT=by_slot,
            RANK=0 if inner is None else _rank(inner.shape[1]), **flags,
            GROUP=8, ROWS=rows, COLUMNS=columns, DEPTH=deep, WIDE=wide or far(some), PRECISION=_precision(x), num_warps=warps,
            num_stages=stages, **told,
        )  # fmt: skip

    _launch_all(PRODUCT, x, plan, weight, rows, launch)
    return out


def _gate_backward(
    dh: Tensor, dots: Tensor | None, both: Tensor, d_both: Tensor, plan: Plan, gate: Gate, routing_weights: Tensor,
    with_h: bool,
) -> Tensor:  # fmt: skip
    """Fills `d_both`, and `dh` with what went down; returns the gradient of the routing weights [T, k]."""
    from engine.kernels.experts.kernels import gate_backward_kernel

    slots, width = dh.shape
    out = torch.zeros_like(routing_weights)  # slots of no expert are not written
    gate_backward_kernel[(slots,)](
        dh, both, plan.order, plan.starts, routing_weights, _or(dots, dh), d_both, out, plan.starts.shape[0] - 1, width,
        gate.limit, gate.alpha, HAS_DOTS=dots is not None, ACTIVATION=ACTIVATIONS.index(gate.activation),
        INTERLEAVED=gate.interleaved, WITH_H=with_h, WIDE=far(dh, both, d_both), BLOCK=min(bucket(width), 1024), num_warps=4,
    )  # fmt: skip
    return out


def _gram(
    left: Tensor | None, right: Tensor | None, like: Tensor | None, plan: Plan, top_k: int, *,
    left_gathered: bool = False, right_gathered: bool = False, transposed: bool = False,
    weights: Tensor | None = None, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """`left.T @ right` of each expert's rows, [E, left, right] in the shape of `like`, or [E, right, left]."""
    from engine.kernels.experts.kernels import gram_kernel

    assert left is not None
    assert right is not None
    assert like is not None
    out = torch.empty(like.shape, dtype=dtype or like.dtype, device=like.device)
    strides = (out.stride(0), out.stride(2), out.stride(1)) if transposed else out.stride()
    wide, narrow = left.shape[1], right.shape[1]
    size = left.element_size()
    most = 32 if interpreted() else 128 if size == 2 else 64
    columns, across = min(most, max(bucket(wide), 16)), min(most, max(bucket(narrow), 16))
    deep = 16 if interpreted() else 64 if size == 2 else 32
    gram_kernel[(out.shape[0] * -(-wide // columns) * -(-narrow // across),)](
        left, right, plan.order, plan.starts, _or(weights, left), out, wide, narrow, max(top_k, 1),
        left.stride(0), right.stride(0), *strides,
        LEFT_GATHERED=left_gathered, RIGHT_GATHERED=right_gathered, WEIGHTED=weights is not None,
        FULL_LEFT=wide % columns == 0, FULL_RIGHT=narrow % across == 0, LEFT=columns, RIGHT=across, DEPTH=deep, WIDE=far(left, right, out),
        PRECISION=_precision(left),
        num_warps=8 if columns * across > 8192 else 4, num_stages=3,
    )  # fmt: skip
    return out


def _combined(by_slot: Tensor, expert_ids: Tensor, experts: int) -> Tensor:
    """[T, N]: the sum of each token's slots, those of no expert left out."""
    from engine.kernels.experts.kernels import combine_kernel

    (tokens, top_k), width = expert_ids.shape, by_slot.shape[1]
    out = by_slot.new_empty(tokens, width)
    block = min(bucket(width), 1024)
    combine_kernel[(tokens * -(-width // block),)](
        by_slot, expert_ids, out, experts, width, TOP_K=top_k, WIDE=far(by_slot, out), BLOCK=block, num_warps=4
    )
    return out


def _turned(factor: Tensor | None) -> Tensor | None:
    return None if factor is None else factor.transpose(1, 2)


def _column(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.unsqueeze(2)


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    return other if tensor is None else tensor


def _lora(inner: Tensor | None, b: Tensor | None) -> tuple[int, ...]:
    """The rank, and the strides of B's experts, columns and rank."""
    return (0, 0, 0, 0) if inner is None or b is None else (inner.shape[1], *b.stride())


IN_TURN, INSIDE, BESIDE = 0, 1, 2
"""Ways of a product with packed experts: some unpacked after the other, decoded inside, the next unpacked meanwhile."""
_WORDS = "unpacked first", "decoded inside the product", "unpacked beside the product before"


class Ways(Tiles):
    """Ways of a product with packed experts, in words."""

    def words(self, tile: Tile) -> str:
        return _WORDS[tile[0]]


@cache
def _ways(tiles: Tiles, *ways: int) -> Ways:
    """These ways, the one picked by hand first."""
    return Ways(f"packed_{tiles.kernel}", 1, ("way",), tuple((way,) for way in ways), lambda way: Cost(0, 0))


def decoded_rows(kind: str) -> int:
    """Rows that experts of this kind have on average up to which products decode them inside without having been timed."""
    return DECODED_ROWS * (2 if kind == "fp8" else 1)


def decoding(tiles: Tiles, weight: PackedExperts, x: Tensor, rows: int, halves: bool) -> Tiles | None:
    """The tiles in which a product can decode this [E, N, K] weight inside: whole ones, in which blocks of scales fit, or which
    fit in a block. None where there are none."""
    held, form, (_, n, k) = weight.held, weight.form, weight.shape
    eight, blocks = form.kind == "fp8", -(-form.columns // form.block)
    lines = -(-form.rows // form.scale_block) if eight else form.rows
    lengths = form.rows * form.columns // (1 if eight else 2), lines * blocks
    whole = (held.numbers.shape[1], held.scales.shape[1]) == lengths and (eight or form.columns % form.block == 0)
    if form.kind not in DECODED or not (whole and form.finite) or x.element_size() != 2 or (form.turned and halves):
        return None

    def fits(tile: Tile) -> bool:
        columns, deep, *_ = _capped(tile, x, rows, n // 2 if tiles is UP else n, k)
        columns = 2 * columns if tiles is UP else columns
        wide = columns if form.turned else deep
        return (
            k % deep == 0 and not (form.turned and n % columns) and (wide % form.block == 0 or form.block % wide == 0)
        )

    inside = for_card(UP_DECODED if tiles is UP else PRODUCT_DECODED, x.device)
    found = tuple(tile for tile in inside.candidates if fits(tile))
    return replace(inside, candidates=found) if found else None


def _launch_all(
    tiles: Tiles, x: Tensor, plan: Plan, weight: Tensor, rows: int, launch: Callable[[Tensor, int, dict[str, int], Tile], None],
    halves: bool = False,
) -> None:  # fmt: skip
    """Launches the product with all of a weight. Of a packed one either its tiles are decoded inside, or one part after the
    other is unpacked and multiplied, maybe the next meanwhile: whichever takes less time for so many rows."""
    if not isinstance(weight, PackedExperts):
        launch(weight, 0, {}, _tile(tiles, x, weight, rows, partial(launch, weight, 0, {})))
        return
    inside = decoding(tiles, weight, x, rows, halves)

    def go(way: Tile) -> None:
        if way == (INSIDE,) and inside is not None:
            launch(weight, 0, {}, _tile(inside, x, weight, rows, partial(launch, weight, 0, {})))
            return
        beside = way == (BESIDE,)
        told = register_limit(REGISTERS) if beside else {}
        for some, opens in weight.in_turn(plan.starts, beside):
            launch(some, opens, told, _tile(tiles, x, some, rows, partial(launch, some, opens, told)))

    unpacked = ([BESIDE, IN_TURN] if AHEAD else [IN_TURN, BESIDE]) if weight.can_go_ahead else [IN_TURN]
    decoded = [INSIDE] if inside is not None else []
    few = plan.order.shape[0] <= decoded_rows(weight.form.kind) * weight.shape[0]
    ways = _ways(tiles, *(decoded + unpacked if few else unpacked + decoded))
    experts, n, k = (bucket(side) for side in weight.shape)
    key = (bucket(x.shape[0]), experts, n, k, rows, str(x.dtype), weight.form.kind, int(weight.form.turned))
    go(TUNER.pick(ways, key, x.device, go))


def _tile(tiles: Tiles, x: Tensor, weight: Tensor, rows: int, launch: Callable[[Tile], None]) -> Tile:
    tiles = for_card(tiles, x.device)
    if not TUNER.on:
        return tiles.default
    experts, width, depth = weight.shape
    key: Key = (bucket(x.shape[0]), bucket(experts), bucket(width), bucket(depth), rows, str(x.dtype))
    if isinstance(weight, PackedExperts):
        key += weight.form.kind, int(weight.form.turned)
    else:
        key += (int(weight.stride(2) == 1),)
    return TUNER.pick(tiles, key, x.device, launch)
