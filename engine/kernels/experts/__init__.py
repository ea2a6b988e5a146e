"""The experts of a mixture, with LoRA on each: tokens sorted, projected, gated, weighted and added up again.

`expert_mlp` is the whole block behind the router in a handful of launches: rows are gathered as they are read, adapters
are added inside the products, gate and up become what goes down before they leave the registers, and results are scaled
and put in their tokens' places as they are written. Nothing waits for the device, no sum depends on an order of arrival,
and beyond the result the forward pass keeps gate and up alone, S * 2 I numbers, and rank-sized ones. Projections and
biases may be trained too. float64 and what has no kernel get plain torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.kernels.experts.in_tiles import expert_mlp_in_tiles
from engine.kernels.experts.launch import (
    Kept,
    Plan,
    Settings,
    Wanted,
    Weights,
    backward,
    formats_of,
    forward,
    prepared,
    serves,
)
from engine.kernels.experts.one_by_one import expert_mlp_one_by_one
from engine.kernels.experts.packed import PackedExperts
from engine.kernels.experts.reference import (
    ACTIVATIONS,
    SWIGLU,
    ExpertLoRA,
    Gate,
    expert_mlp_dense,
    expert_mlp_reference,
)
from engine.kernels.requirements import LARGEST_EXPERT_RANK
from engine.kernels.shapes import first_derivatives_alone, refuse_formats

__all__ = ["ACTIVATIONS", "ExpertLoRA", "Gate", "expert_mlp", "expert_mlp_reference"]


def expert_mlp(
    x: Tensor,
    expert_ids: Tensor,
    routing_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate_up_lora: ExpertLoRA | None = None,
    down_lora: ExpertLoRA | None = None,
    gate: Gate = SWIGLU,
    tile_tokens: int | None = None,
) -> Tensor:
    """`sum_j w[t, j] * down_e(gate(gate_up_e(x[t])))` over the experts e = ids[t, j] of each token, [T, H]; differentiable.

    Args:
        x: [T, H]; expert_ids: [T, k] int64 or int32, where an id outside of [0, E) takes part in nothing;
            routing_weights: [T, k] in any float format.
        gate_up: [E, 2 I, H]; down: [E, H, I]; either may be a transposed view of how it is stored. Both may be
            `PackedExperts`, of which routed experts alone are unpacked; nothing unpacked is kept.
        gate_up_bias: [E, 2 I]; down_bias: [E, H].
        gate_up_lora, down_lora: adapters of the two projections, in any float format.
        gate: how gate and up become what goes down.
        tile_tokens: packed experts take more tokens than these in tiles, and are unpacked once for all of them.

    Computes in `gate_up`'s format with sums in float32, returns x's. Raises ValueError for what does not belong together,
    RuntimeError for a second derivative.

    Source: arXiv:2403.08245 (sorted experts without padding), arXiv:2106.09685 (LoRA).
    """
    _refuse(x, expert_ids, routing_weights, gate_up, down, gate_up_bias, down_bias, gate_up_lora, down_lora, gate)
    rows = x.to(gate_up.dtype)
    weights: list[Tensor | None] = [gate_up, down, gate_up_bias, down_bias]
    for lora in (gate_up_lora, down_lora):
        weights += [None, None] if lora is None else [lora.a, lora.b]
    settings = Settings(gate, *(1.0 if lora is None else float(lora.scale) for lora in (gate_up_lora, down_lora)))
    compiling = torch.compiler.is_compiling()
    packed = isinstance(gate_up, PackedExperts)
    if isinstance(gate_up, PackedExperts) and isinstance(down, PackedExperts) and 0 < (tile_tokens or 0) < len(x):
        assert tile_tokens is not None
        small = tuple(weights[2:])
        out = expert_mlp_in_tiles(
            rows, expert_ids, routing_weights, gate_up, down, small, settings, tile_tokens, expert_mlp
        )
        return out.to(x.dtype)
    if packed and not (_in_graph(rows, expert_ids) if compiling else serves(rows, expert_ids)):
        return _one_by_one(rows, expert_ids, routing_weights, weights, settings).to(x.dtype)
    if (compiling and not _in_graph(rows, expert_ids)) or (not compiling and not serves(rows, expert_ids)):
        plain = expert_mlp_dense if compiling else expert_mlp_reference
        return plain(
            rows, expert_ids, routing_weights, gate_up, down, gate_up_bias=gate_up_bias, down_bias=down_bias,
            gate_up_lora=gate_up_lora, down_lora=down_lora, gate=gate,
        ).to(x.dtype)  # fmt: skip
    if compiling:
        from engine.kernels.experts.registered import expert_mlp_in_graph

        return expert_mlp_in_graph(rows, expert_ids, routing_weights, weights, settings).to(x.dtype)
    out = _Experts.apply(settings, rows, expert_ids, routing_weights, *weights)
    return out.to(x.dtype)


_one_by_one = torch.compiler.disable(expert_mlp_one_by_one)
"""Outside of graphs: which experts are routed is known while it computes."""


def _in_graph(x: Tensor, expert_ids: Tensor) -> bool:
    """Whether compiled code, which cannot ask the card, takes the kernels."""
    return x.is_cuda and x.dtype != torch.float64 and expert_ids.numel() > 0


def _refuse(
    x: Tensor, ids: Tensor, routing_weights: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, gate_up_lora: ExpertLoRA | None, down_lora: ExpertLoRA | None, gate: Gate,
) -> None:  # fmt: skip
    shapes = x.dim() == 2 and gate_up.dim() == 3 and down.dim() == 3 and ids.dim() == 2
    if shapes:
        experts, twice, hidden = gate_up.shape
        shapes = x.shape[1] == hidden and down.shape == (experts, hidden, twice // 2) and twice % 2 == 0
        shapes = shapes and ids.shape[0] == x.shape[0] and routing_weights.shape == ids.shape
    if not shapes:
        given = ", ".join(str(tuple(each.shape)) for each in (x, ids, routing_weights, gate_up, down))
        raise ValueError(
            "expert_mlp: must get x [T, H], ids [T, k], routing weights [T, k], gate_up [E, 2 I, H] and down [E, H, I]; "
            f"got {given}"
        )
    named: dict[str, Tensor | None] = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
    for name, bias, of in (("gate_up_bias", gate_up_bias, gate_up), ("down_bias", down_bias, down)):
        if bias is not None and bias.shape != of.shape[:2]:
            raise ValueError(f"expert_mlp: {name} must be {tuple(of.shape[:2])}; got {tuple(bias.shape)}")
    for name, lora, of in (("gate_up_lora", gate_up_lora, gate_up), ("down_lora", down_lora, down)):
        if lora is None:
            continue
        rank = lora.a.shape[1] if lora.a.dim() == 3 else 0
        if lora.a.shape != (of.shape[0], rank, of.shape[2]) or lora.b.shape != (*of.shape[:2], rank) or not rank:
            raise ValueError(
                f"expert_mlp: {name} must be A [{of.shape[0]}, r, {of.shape[2]}] and B [{of.shape[0]}, {of.shape[1]}, r]; "
                f"got {tuple(lora.a.shape)} and {tuple(lora.b.shape)}"
            )
        if rank > LARGEST_EXPERT_RANK:
            raise ValueError(f"expert_mlp: {name} must have a rank of at most {LARGEST_EXPERT_RANK}; got {rank}")
        named |= {f"{name}.a": lora.a, f"{name}.b": lora.b}
    refuse_formats("expert_mlp", x=x, routing_weights=routing_weights, gate_up=gate_up, down=down, **named)
    if isinstance(down, PackedExperts) != isinstance(gate_up, PackedExperts):
        raise ValueError("expert_mlp: gate_up and down must both be packed, or neither")
    if down.dtype != gate_up.dtype:
        raise ValueError(f"expert_mlp: down must be {gate_up.dtype} as gate_up is; got {down.dtype}")
    if ids.dtype not in (torch.int64, torch.int32) or ids.device != x.device:
        raise ValueError(f"expert_mlp: ids must be int64 or int32 on {x.device}; got {ids.dtype} on {ids.device}")
    if gate.activation not in ACTIVATIONS:
        raise ValueError(f"expert_mlp: activation must be one of {', '.join(ACTIVATIONS)}; got {gate.activation!r}")


class _Experts(torch.autograd.Function):
    """The eager path: one autograd node that keeps gate and up."""

    @staticmethod
    def forward(
        ctx: Any, settings: Settings, x: Tensor, ids: Tensor, routing: Tensor, *weights: Tensor | None
    ) -> Tensor:
        x, ids, routing, held = prepared(x, ids, routing, weights)
        out, kept = forward(x, ids, routing, held, settings)
        ctx.settings = settings
        ctx.formats = formats_of(weights)
        # What moves saved tensors elsewhere need not know of packed ones.
        ctx.packed = {name: each for name, each in held._asdict().items() if isinstance(each, PackedExperts)}
        plain = [None if isinstance(each, PackedExperts) else each for each in held]
        ctx.save_for_backward(x, ids, routing, *plain, *kept.plan, kept.both, kept.gate_up_inner, kept.down_inner)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        first_derivatives_alone("expert_mlp")
        x, ids, routing, *rest = ctx.saved_tensors
        held, kept = Weights(*rest[:8])._replace(**ctx.packed), Kept(Plan(*rest[8:12]), *rest[12:])
        _, need_x, _, need_routing, *need = ctx.needs_input_grad
        wanted = Wanted(need_x, need_routing, tuple(need), ctx.formats)
        dx, d_routing, found = backward(grads[0], x, ids, routing, held, ctx.settings, kept, wanted)
        return None, dx, None, d_routing, *found
