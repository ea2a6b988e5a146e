"""Cross-entropies, log-probabilities, entropies and more from hidden states and the head, never holding all logits.

Two plans, by what must be differentiated:

- frozen head: chunks of rows, and the gradient of each row's cross-entropy (where it is asked for, else of its
  log-probability) is formed in the forward pass beside it; backward only scales rows. Two matrix products in all,
  whatever loss stands on top (`d loss / d score` is one number a row). A gradient of another score needs the logits
  again: three products.
- trained head: statistics in the forward pass, then slices of the vocabulary in the backward pass, so that each slice's
  weight gradient is one product over all rows and is rounded once. Four products, no float32 copy of the gradient.

Rows whose target is ignored are left out of every product. Serves CUDA and Triton's interpreter by kernels, and any other
device by the same order of work in plain torch. Compiled code gets registered operations (`registered`), a head that is cut
over several processes `shards`.
"""

from __future__ import annotations

from typing import Any

import torch

from engine.kernels.linear_logp.passes import backward_pass, forward_pass, scales_early, working_type
from engine.kernels.linear_logp.reference import TokenScores, linear_logp_reference
from engine.kernels.linear_logp.tiles import Scaling, Upstream
from engine.kernels.shapes import first_derivatives_alone, refuse_scaling, refuse_shapes

__all__ = ["OUTPUTS", "LinearLogp", "TokenScores", "linear_logp", "linear_logp_reference", "workspace"]

OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
# On an H200 320 MiB of logits ran within 3 % of 640 MiB (results.csv, ce_frozen); a CPU wants a tile near its caches.
CUDA_WORKSPACE, CPU_WORKSPACE = 320 << 20, 16 << 20


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
    found = _apply(hidden[kept], weight, bias, targets[kept], scaling, room, outputs)
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
        scaling.label_smoothing, scaling.z_loss,
    )  # fmt: skip


def workspace(device: torch.device) -> int:
    """Bytes of logits held at once: less where the card is nearly full, since speed hardly depends on it.

    Products of other sizes round otherwise, so where numbers must be the same the size does not look at the card.
    """
    if device.type != "cuda":
        return CPU_WORKSPACE
    if torch.are_deterministic_algorithms_enabled():
        return CUDA_WORKSPACE
    return max(32 << 20, min(CUDA_WORKSPACE, torch.cuda.mem_get_info(device)[0] // 4))


class LinearLogp(torch.autograd.Function):
    """The op with its settings in order; returns the fields of TokenScores as a tuple."""

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
    ) -> tuple[torch.Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        scaling = Scaling(temperature, soft_cap, logit_scale, label_smoothing, z_loss)
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        early = need_hidden and not need_weight and not need_bias
        scores, d_rows = forward_pass(hidden, weight, bias, targets, scaling, outputs, workspace_bytes, early=early)
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
            return (d_rows * each.unsqueeze(-1)).to(hidden.dtype), None, None, *rest
        found = backward_pass(
            hidden, weight, bias, targets, lse, entropy, upstream, ctx.scaling, ctx.dtype, ctx.workspace_bytes,
            ctx.needs_input_grad[:3],
        )  # fmt: skip
        return *found, *rest
