"""Cross-entropies, log-probabilities, entropies and more from hidden states and the head, never holding all logits.

Two plans, by what must be differentiated:

- frozen head: chunks of rows, and the gradient of each row's cross-entropy (where it is asked for, else of its
  log-probability) is formed in the forward pass beside it; backward only scales rows. Two matrix products in all,
  whatever loss stands on top (`d loss / d score` is one number a row). A gradient of another score needs the logits
  again: three products.
- trained head: slices of the vocabulary in both passes, so that each slice's weight gradient is one product over all rows
  and is rounded once, and no float32 copy of it is needed. Logits wait for the backward pass where memory is free in
  between (`slices`), the rest is computed again: between three and four products.

Rows whose target is ignored are left out of every product. Serves CUDA and Triton's interpreter by kernels, and any other
device by the same order of work in plain torch. Compiled code gets registered operations (`registered`), a head that is cut
over several processes `shards`.
"""

from __future__ import annotations

from typing import Any

import torch

from engine.kernels.linear_logp.passes import (
    backward_pass,
    forward_in_slices,
    forward_pass,
    scales_early,
    working_type,
)
from engine.kernels.linear_logp.reference import TokenScores, linear_logp_reference
from engine.kernels.linear_logp.tiles import Scaling, Upstream
from engine.kernels.requirements import CPU_WORKSPACE, CUDA_WORKSPACE
from engine.kernels.shapes import first_derivatives_alone, refuse_scaling, refuse_shapes

__all__ = ["OUTPUTS", "LinearLogp", "TokenScores", "linear_logp", "linear_logp_reference", "workspace"]

OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def linear_logp(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    soft_cap: float | None = None,
    logit_scale: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int | None = None,
    outputs: tuple[str, ...] = OUTPUTS,
    workspace_bytes: int | None = None,
) -> TokenScores:
    """`log_softmax(hidden @ weight.T + bias).gather(targets)` and more about each row, without the logits.

    Args:
        hidden: [N, H] float64, float32, float16 or bfloat16; weight: [V, H]; targets: [N] int64 in [0, V).
        bias: [V] or None.
        temperature, soft_cap, logit_scale: logits become `soft_cap * tanh(x * logit_scale / soft_cap) / temperature`.
        label_smoothing, z_loss: of the cross-entropy, as in torch and in PaLM (arXiv:2204.02311).
        ignore_index: rows with this target are left out and give zero and no gradient; None: all rows count, and the
            device is never waited for.
        outputs: which of `entropy`, `log_sum_sq_probs` (log of the sum of squared probabilities), `mean_logits`,
            `is_top1` and `cross_entropy` are computed; the others are None. The middle three carry no gradient.
        workspace_bytes: memory for logits.

    Returns:
        [N] float32 (float64 for float64 input), `is_top1` bool. On a GPU a target outside the vocabulary makes its row
        NaN; on a CPU it raises IndexError or RuntimeError.

    Raises:
        ValueError: shapes that do not belong together, a number format, an output or a setting that is not served.
        RuntimeError: a second derivative.

    Source: arXiv:2411.09009 (scores without logits), arXiv:2410.10989 (gradient in the forward pass).
    """
    refuse_shapes("linear_logp", hidden, weight, targets, bias)
    refuse_scaling("linear_logp", temperature, soft_cap, label_smoothing, z_loss)
    if unknown := set(outputs) - {*OUTPUTS, "cross_entropy"}:
        served = ", ".join((*OUTPUTS, "cross_entropy"))
        raise ValueError(f"outputs: must be among {served}; got {', '.join(sorted(unknown))}")
    scaling = Scaling(temperature, soft_cap, logit_scale, label_smoothing, z_loss)
    room = workspace(hidden.device) if workspace_bytes is None else workspace_bytes
    if torch.compiler.is_compiling():
        from engine.kernels.linear_logp.registered import scores_in_graph

        return scores_in_graph(hidden, weight, bias, targets, scaling, room, outputs, ignore_index)
    if ignore_index is None:
        return TokenScores(*_apply(hidden, weight, bias, targets, scaling, room, outputs))
    kept = (targets != ignore_index).nonzero().squeeze(1)
    if kept.numel() == targets.numel():
        return TokenScores(*_apply(hidden, weight, bias, targets, scaling, room, outputs))
    found = _apply(Rows.apply(hidden, kept), weight, bias, targets[kept], scaling, room, outputs)
    whole: Any = (None if x is None else x.new_zeros(targets.shape).index_put((kept,), x) for x in found)
    return TokenScores(*whole)


def _apply(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    scaling: Scaling,
    room: int,
    outputs: tuple[str, ...],
) -> tuple[Any, ...]:
    return LinearLogp.apply(
        hidden, weight, bias, targets, scaling.temperature, room, scaling.soft_cap, scaling.logit_scale, outputs,
        scaling.label_smoothing, scaling.z_loss, torch.is_grad_enabled(),
    )  # fmt: skip


def workspace(device: torch.device, asked: int | None = None) -> int:
    """Bytes of logits held at once: those that were asked for, else the usual, and of these less where the card is nearly
    full, since speed hardly depends on it.

    Products of other sizes round otherwise, so where numbers must be the same the size does not look at the card.
    """
    if asked is not None:
        return asked
    if device.type != "cuda":
        return CPU_WORKSPACE
    if torch.are_deterministic_algorithms_enabled():
        return CUDA_WORKSPACE
    return max(32 << 20, min(CUDA_WORKSPACE, torch.cuda.mem_get_info(device)[0] // 4))


class Rows(torch.autograd.Function):
    """`hidden[kept]` of rows that differ, whose gradient is written to its place and not added up."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        ctx.kept, ctx.shape = kept, hidden.shape
        return hidden.index_select(0, kept)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.new_zeros(ctx.shape).index_copy_(0, ctx.kept, gradient), None


class LinearLogp(torch.autograd.Function):
    """The op with its settings in order; returns the fields of TokenScores as a tuple.

    `differentiated` is whether gradients are recorded where it is called, which it cannot see itself. What waits for the
    backward pass is no saved tensor: it is used up there, and nothing that looks at saved tensors should carry it away.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        workspace_bytes: int,
        soft_cap: float | None,
        logit_scale: float,
        outputs: tuple[str, ...],
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        differentiated: bool = True,
    ) -> tuple[torch.Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        scaling = Scaling(temperature, soft_cap, logit_scale, label_smoothing, z_loss)
        need_hidden, need_weight, need_bias = (need and differentiated for need in ctx.needs_input_grad[:3])
        given = hidden, weight, bias, targets, scaling, outputs, workspace_bytes
        d_rows = ctx.slices = None
        if need_weight or need_bias:
            scores, ctx.slices = forward_in_slices(*given, trained=need_weight)
        else:
            scores, d_rows = forward_pass(*given, early=need_hidden)
        ctx.save_for_backward(hidden, weight, bias, targets, scores.lse, scores.entropy, d_rows)
        ctx.dtype, ctx.scaling, ctx.workspace_bytes = working_type(hidden), scaling, workspace_bytes
        ctx.early_loss = scores.loss is not None
        ctx.mark_non_differentiable(*(x for x in (scores.square, scores.mean, scores.top) if x is not None))
        return scores.logp, scores.entropy, scores.square, scores.mean, scores.top, scores.loss

    @staticmethod
    def backward(
        ctx: Any,
        d_logp: torch.Tensor | None,
        d_entropy: torch.Tensor | None,
        _square: None,
        _mean: None,
        _top: None,
        d_loss: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        first_derivatives_alone("linear_logp")
        hidden, weight, bias, targets, lse, entropy, d_rows = ctx.saved_tensors
        upstream = Upstream(d_logp, d_entropy, d_loss)
        rest = (None,) * (len(ctx.needs_input_grad) - 3)
        if not upstream.any():
            return None, None, None, *rest
        if (each := scales_early(upstream, ctx.early_loss)) is not None and d_rows is not None:
            return torch.mul(d_rows, each.unsqueeze(-1), out=torch.empty_like(hidden)), None, None, *rest
        slices, ctx.slices = ctx.slices, None
        found = backward_pass(
            hidden, weight, bias, targets, lse, entropy, upstream, ctx.scaling, ctx.dtype, ctx.workspace_bytes,
            ctx.needs_input_grad[:3], slices=slices,
        )  # fmt: skip
        return *found, *rest
