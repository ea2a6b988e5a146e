"""The op as registered operations, which `torch.compile(fullgraph=True)` keeps whole in one graph.

An operation may not hand out None, so what was not asked for is an empty tensor inside; and it may not look at what needs
a gradient, so that is decided where the graph is traced. Ignored rows are left out inside the operation, where their
number may depend on the data.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.kernels.linear_logp.passes import backward_pass, forward_pass, scales_early, working_type
from engine.kernels.linear_logp.reference import TokenScores
from engine.kernels.linear_logp.tiles import Scaling, Upstream

_NONE = -(1 << 62)
"""Stands for "no target is ignored": no batch has such a target."""


def scores_in_graph(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    scaling: Scaling,
    room: int,
    outputs: tuple[str, ...],
    ignore_index: int | None,
) -> TokenScores:
    """All scores as one node of the graph."""
    dtype = working_type(hidden)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    trained = weight.requires_grad or (bias is not None and bias.requires_grad)
    early = torch.is_grad_enabled() and hidden.requires_grad and not trained
    logp, entropy, square, mean, top, loss, _lse, _d_rows = linear_logp_op(
        hidden, weight, bias, targets, _numbers(scaling), room, ",".join(outputs),
        _NONE if ignore_index is None else ignore_index, early,
    )  # fmt: skip
    told = {"entropy": entropy, "log_sum_sq_probs": square, "mean_logits": mean, "is_top1": top, "cross_entropy": loss}
    return TokenScores(logp, **{name: x if name in outputs else None for name, x in told.items()})


def _numbers(scaling: Scaling) -> list[float]:
    return [
        scaling.temperature, scaling.soft_cap or 0.0, scaling.logit_scale, scaling.label_smoothing, scaling.z_loss
    ]  # fmt: skip


def _scaling(numbers: list[float]) -> Scaling:
    temperature, soft_cap, *rest = numbers
    return Scaling(temperature, soft_cap or None, *rest)


def _wide(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


@torch.library.custom_op("workbench::linear_logp", mutates_args=())
def linear_logp_op(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, numbers: list[float], room: int, outputs: str,
    ignore_index: int, early: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    kept = (targets != ignore_index).nonzero().squeeze(1)
    scores, d_rows = forward_pass(
        hidden[kept], weight, bias, targets[kept], _scaling(numbers), tuple(outputs.split(",")), room, early=early
    )

    def whole(x: Tensor | None, shape: torch.Size) -> Tensor:
        if x is None:
            return hidden.new_empty(0, dtype=_wide(hidden))
        return x.new_zeros(shape).index_copy_(0, kept, x)

    rows = targets.shape
    return (
        whole(scores.logp, rows), whole(scores.entropy, rows), whole(scores.square, rows), whole(scores.mean, rows),
        whole(scores.top, rows), whole(scores.loss, rows), whole(scores.lse, rows), whole(d_rows, hidden.shape),
    )  # fmt: skip


@linear_logp_op.register_fake
def _(hidden, weight, bias, targets, numbers, room, outputs, ignore_index, early):
    wide, asked = _wide(hidden), outputs.split(",")

    def fresh(name: str, dtype: torch.dtype = wide) -> Tensor:
        return hidden.new_empty(targets.shape, dtype=dtype) if name in asked else hidden.new_empty(0, dtype=wide)

    return (
        hidden.new_empty(targets.shape, dtype=wide), fresh("entropy"), fresh("log_sum_sq_probs"), fresh("mean_logits"),
        fresh("is_top1", torch.bool), fresh("cross_entropy"), hidden.new_empty(targets.shape, dtype=wide),
        hidden.new_empty(hidden.shape) if early else hidden.new_empty(0, dtype=wide),
    )  # fmt: skip


@torch.library.custom_op("workbench::linear_logp_backward", mutates_args=())
def linear_logp_backward_op(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, lse: Tensor, entropy: Tensor,
    d_logp: Tensor | None, d_entropy: Tensor | None, d_loss: Tensor | None,
    numbers: list[float], room: int, ignore_index: int, need_hidden: bool, need_weight: bool, need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    kept = (targets != ignore_index).nonzero().squeeze(1)
    upstream = Upstream(*(None if d is None else d[kept] for d in (d_logp, d_entropy, d_loss)))
    d_hidden, d_weight, d_bias = backward_pass(
        hidden[kept], weight, bias, targets[kept], lse[kept], entropy[kept] if entropy.numel() else None, upstream,
        _scaling(numbers), hidden.dtype, room, (need_hidden, need_weight, need_bias),
    )  # fmt: skip
    if d_hidden is not None:
        d_hidden = hidden.new_zeros(hidden.shape).index_copy_(0, kept, d_hidden)

    def there(gradient: Tensor | None) -> Tensor:
        return hidden.new_empty(0) if gradient is None else gradient

    return there(d_hidden), there(d_weight), there(d_bias)


@linear_logp_backward_op.register_fake
def _(hidden, weight, bias, targets, lse, entropy, d_logp, d_entropy, d_loss, numbers, room, ignore_index, *need):
    return tuple(
        x.new_empty(x.shape) if wanted and x is not None else hidden.new_empty(0)
        for x, wanted in zip((hidden, weight, bias), need, strict=True)
    )


def _remember(ctx: Any, inputs: Any, output: Any) -> None:
    hidden, weight, bias, targets, ctx.numbers, ctx.room, ctx.outputs, ctx.ignore_index, _early = inputs
    _logp, entropy, *_, lse, d_rows = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy, d_rows)


def _differentiate(
    ctx: Any, d_logp: Any, d_entropy: Any, _square: Any, _mean: Any, _top: Any, d_loss: Any, *_: Any
) -> Any:
    *tensors, d_rows = ctx.saved_tensors
    hidden, asked, rest = tensors[0], ctx.outputs.split(","), (None,) * 6
    upstream = Upstream(d_logp, d_entropy if "entropy" in asked else None, d_loss if "cross_entropy" in asked else None)
    if not upstream.any():
        return None, None, None, *rest
    each = scales_early(upstream, "cross_entropy" in asked)
    if each is not None and d_rows.numel():
        return (d_rows * each.unsqueeze(-1)).to(hidden.dtype), None, None, *rest
    need = ctx.needs_input_grad[:3]
    found = linear_logp_backward_op(*tensors, *upstream, ctx.numbers, ctx.room, ctx.ignore_index, *need)
    return *(d if wanted else None for d, wanted in zip(found, need, strict=True)), *rest


linear_logp_op.register_autograd(_differentiate, setup_context=_remember)
