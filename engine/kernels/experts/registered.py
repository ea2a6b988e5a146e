"""The op as registered operations, which `torch.compile(fullgraph=True)` keeps whole in one graph.

Given packed experts, each becomes one over their parts: compiled code holds plain tensors alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.kernels.experts.launch import (
    Kept,
    Plan,
    Settings,
    Wanted,
    backward,
    formats_of,
    forward,
    prepared,
    rows_of_a_tile,
    tiles_at_most,
)
from engine.kernels.experts.packed import TAKES_PACKED, Form, Held, PackedExperts
from engine.kernels.experts.reference import Gate


def expert_mlp_in_graph(
    x: Tensor, ids: Tensor, routing: Tensor, weights: list[Tensor | None], settings: Settings
) -> Tensor:
    """The result [T, H] of one node in a graph."""
    gate = settings.gate
    numbers = [gate.limit, gate.alpha, settings.gate_up_scale, settings.down_scale]
    out: Tensor = expert_mlp_op(x, ids, routing, *weights, gate.activation, gate.interleaved, numbers)[0]
    return out


Sizes = list[tuple[tuple[int, ...], torch.dtype]]


def _kept_sizes(x: Tensor, ids: Tensor, gate_up: Tensor, gate_up_a: Tensor | None, down_a: Tensor | None) -> Sizes:
    """Shapes and formats of what the forward operation hands on beside the result."""
    slots, experts, twice = ids.numel(), gate_up.shape[0], gate_up.shape[1]
    tiles = tiles_at_most(slots, experts, rows_of_a_tile(slots, experts))
    of_plan: Sizes = [((size,), torch.int32) for size in (slots, experts + 1, tiles, tiles)]
    inner: Sizes = [((slots, 0 if a is None else a.shape[1]), x.dtype) for a in (gate_up_a, down_a)]
    return [*of_plan, ((slots, twice), x.dtype), *inner]


def _settings(activation: str, interleaved: bool, numbers: list[float]) -> Settings:
    return Settings(Gate(activation, interleaved, numbers[0], numbers[1]), numbers[2], numbers[3])


Made = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _computed(
    x: Tensor, ids: Tensor, routing: Tensor, given: list[Tensor | None], activation: str, interleaved: bool,
    numbers: list[float],
) -> Made:  # fmt: skip
    settings = _settings(activation, interleaved, numbers)
    x, ids, routing, held = prepared(x, ids, routing, given)
    out, kept = forward(x, ids, routing, held, settings)

    def there(inner: Tensor | None) -> Tensor:
        return x.new_empty(ids.numel(), 0) if inner is None else inner

    return out, *kept.plan, kept.both, there(kept.gate_up_inner), there(kept.down_inner)


@torch.library.custom_op("workbench::expert_mlp", mutates_args=())
def expert_mlp_op(
    x: Tensor, ids: Tensor, routing: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, gate_up_a: Tensor | None, gate_up_b: Tensor | None, down_a: Tensor | None,
    down_b: Tensor | None, activation: str, interleaved: bool, numbers: list[float],
) -> Made:  # fmt: skip
    given = [gate_up, down, gate_up_bias, down_bias, gate_up_a, gate_up_b, down_a, down_b]
    return _computed(x, ids, routing, given, activation, interleaved, numbers)


@torch.library.custom_op("workbench::expert_mlp_packed", mutates_args=())
def expert_mlp_packed_op(
    x: Tensor, ids: Tensor, routing: Tensor, parts: list[Tensor], forms: str, small: list[Tensor | None],
    activation: str, interleaved: bool, numbers: list[float],
) -> Made:  # fmt: skip
    return _computed(x, ids, routing, [*_put_together(parts, forms), *small], activation, interleaved, numbers)


@torch.library.custom_op("workbench::expert_mlp_backward", mutates_args=())
def expert_mlp_backward_op(
    dy: Tensor, x: Tensor, ids: Tensor, routing: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, gate_up_a: Tensor | None, gate_up_b: Tensor | None, down_a: Tensor | None,
    down_b: Tensor | None, kept: list[Tensor], wanted: list[bool], activation: str, interleaved: bool,
    numbers: list[float],
) -> list[Tensor]:  # fmt: skip
    given = [gate_up, down, gate_up_bias, down_bias, gate_up_a, gate_up_b, down_a, down_b]
    return _computed_back(dy, x, ids, routing, given, kept, wanted, activation, interleaved, numbers)


@torch.library.custom_op("workbench::expert_mlp_packed_backward", mutates_args=())
def expert_mlp_packed_backward_op(
    dy: Tensor, x: Tensor, ids: Tensor, routing: Tensor, parts: list[Tensor], forms: str, small: list[Tensor | None],
    kept: list[Tensor], wanted: list[bool], activation: str, interleaved: bool, numbers: list[float],
) -> list[Tensor]:  # fmt: skip
    given = [*_put_together(parts, forms), *small]
    return _computed_back(dy, x, ids, routing, given, kept, wanted, activation, interleaved, numbers)


def _computed_back(
    dy: Tensor, x: Tensor, ids: Tensor, routing: Tensor, given: list[Tensor | None], kept: list[Tensor],
    wanted: list[bool], activation: str, interleaved: bool, numbers: list[float],
) -> list[Tensor]:  # fmt: skip
    settings = _settings(activation, interleaved, numbers)
    x, ids, routing, held = prepared(x, ids, routing, given)
    plan, (both, *inner) = Plan(*kept[:4]), kept[4:]
    inner_or_none = [
        None if of is None else each for of, each in zip((held.gate_up_a, held.down_a), inner, strict=True)
    ]
    dx, d_routing, found = backward(
        dy, x, ids, routing, held, settings, Kept(plan, both, *inner_or_none),
        Wanted(wanted[0], wanted[1], tuple(wanted[2:]), formats_of(given)),
    )  # fmt: skip
    grads = [dx, d_routing, *found]
    return [x.new_empty(0) if each is None else each for each in grads]


def _taken_apart(*weights: PackedExperts) -> tuple[list[Tensor], str]:
    """The parts of packed weights in order, and what they are, in words that `_put_together` reads."""
    parts, words = list[Tensor](), list[str]()
    for weight in weights:
        names, form = weight.__tensor_flatten__()
        parts += [getattr(weight.held, name) for name in names]
        dtype = str(form.dtype).removeprefix("torch.")
        words.append(" ".join([",".join(names), dtype, form.kind, *(str(int(each)) for each in _numbers(form))]))
    # Compiled code holds this between quotes, which torch 2.11 does not mask.
    return parts, ";".join(words)


def _put_together(parts: list[Tensor], forms: str) -> list[PackedExperts]:
    left, found = iter(parts), list[PackedExperts]()
    for words in forms.split(";"):
        names, dtype, kind, *numbers = words.split(" ")
        held = Held(**{name: next(left) for name in names.split(",")})
        rows, columns, turned, block, scale_block, finite = map(int, numbers)
        form = Form(kind, rows, columns, bool(turned), block, scale_block, getattr(torch, dtype), bool(finite))
        found.append(PackedExperts(held, form))
    return found


def _numbers(form: Form) -> tuple[int, ...]:
    return form.rows, form.columns, form.turned, form.block, form.scale_block, form.finite


def _over_packed(
    x: Tensor, ids: Tensor, routing: Tensor, gate_up: PackedExperts, down: PackedExperts, *more: Any
) -> Made:
    *small, activation, interleaved, numbers = more
    return expert_mlp_packed_op(
        x, ids, routing, *_taken_apart(gate_up, down), list(small), activation, interleaved, numbers
    )


def _back_over_packed(
    dy: Tensor, x: Tensor, ids: Tensor, routing: Tensor, gate_up: PackedExperts, down: PackedExperts, *more: Any
) -> list[Tensor]:
    *small, kept, wanted, activation, interleaved, numbers = more
    return expert_mlp_packed_backward_op(
        dy, x, ids, routing, *_taken_apart(gate_up, down), list(small), kept, wanted, activation, interleaved, numbers
    )


TAKES_PACKED[torch.ops.workbench.expert_mlp.default] = _over_packed
TAKES_PACKED[torch.ops.workbench.expert_mlp_backward.default] = _back_over_packed


@expert_mlp_packed_op.register_fake
def _(x, ids, routing, parts, forms, small, activation, interleaved, numbers):
    gate_up, _ = _put_together(parts, forms)
    sizes = _kept_sizes(x, ids, gate_up, small[2], small[4])
    return x.new_empty(x.shape), *(x.new_empty(size, dtype=dtype) for size, dtype in sizes)


@expert_mlp_packed_backward_op.register_fake
def _(dy, x, ids, routing, parts, forms, small, kept, wanted, activation, interleaved, numbers):
    of = [x, routing, None, None, *small]
    return [
        torch.empty(each.shape, dtype=each.dtype, device=each.device) if asked and each is not None else x.new_empty(0)
        for each, asked in zip(of, wanted, strict=True)
    ]


@expert_mlp_op.register_fake
def _(
    x, ids, routing, gate_up, down, gate_up_bias, down_bias, gate_up_a, gate_up_b, down_a, down_b, activation,
    interleaved, numbers,
):  # fmt: skip
    sizes = _kept_sizes(x, ids, gate_up, gate_up_a, down_a)
    return x.new_empty(x.shape), *(x.new_empty(size, dtype=dtype) for size, dtype in sizes)


@expert_mlp_backward_op.register_fake
def _(
    dy, x, ids, routing, gate_up, down, gate_up_bias, down_bias, gate_up_a, gate_up_b, down_a, down_b, kept, wanted,
    activation, interleaved, numbers,
):  # fmt: skip
    of = [x, routing, gate_up, down, gate_up_bias, down_bias, gate_up_a, gate_up_b, down_a, down_b]
    return [
        torch.empty(each.shape, dtype=each.dtype, device=each.device) if asked and each is not None else x.new_empty(0)
        for each, asked in zip(of, wanted, strict=True)
    ]


def _remember(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.activation, ctx.interleaved, ctx.numbers = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx: Any, dy: Tensor, *_: Any) -> Any:
    saved = ctx.saved_tensors
    given, kept = saved[:11], list(saved[11:])
    need = ctx.needs_input_grad
    wanted = [need[0], *need[2:11]]
    found = expert_mlp_backward_op(dy, *given, kept, wanted, ctx.activation, ctx.interleaved, ctx.numbers)
    dx, d_routing, *rest = (each if asked else None for each, asked in zip(found, wanted, strict=True))
    return dx, None, d_routing, *rest, None, None, None


expert_mlp_op.register_autograd(_differentiate, setup_context=_remember)
