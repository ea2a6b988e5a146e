"""Log-probabilities, entropies and more from hidden states and the head, never holding all logits.

Two plans, by what must be differentiated:

- frozen head: chunks of rows, and the gradient of each row's log-probability is formed in the forward pass beside it;
  backward only scales rows. Two matrix products in all, whatever loss stands on top (`d loss / d logp` is one number a
  row). A gradient of the entropy needs the logits again: three products.
- trained head: statistics in the forward pass, then slices of the vocabulary in the backward pass, so that each slice's
  weight gradient is one product over all rows and is rounded once. Four products, no float32 copy of the gradient.

Serves CUDA and Triton's interpreter by kernels, and any other device by the same order of work in plain torch.
"""

from __future__ import annotations

from typing import Any

import torch

from engine.kernels.linear_logp.reference import TokenScores, linear_logp_reference
from engine.kernels.linear_logp.tiles import Scaling, Scores, to_gradient

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
    outputs: tuple[str, ...] = OUTPUTS,
    workspace_bytes: int | None = None,
) -> TokenScores:
    """`log_softmax(hidden @ weight.T + bias).gather(targets)` and more about each row, without the logits.

    Args:
        hidden: [N, H] float64, float32, float16 or bfloat16; weight: [V, H]; targets: [N] int64 in [0, V).
        bias: [V] or None.
        temperature, soft_cap, logit_scale: logits become `soft_cap * tanh(x * logit_scale / soft_cap) / temperature`.
        outputs: which of `entropy`, `log_sum_sq_probs` (log of the sum of squared probabilities), `mean_logits` and
            `is_top1` are computed; the others are None. The last three carry no gradient.
        workspace_bytes: memory for logits.

    Returns:
        [N] float32 (float64 for float64 input), `is_top1` bool.

    Source: arXiv:2411.09009 (scores without logits), arXiv:2410.10989 (gradient in the forward pass).
    """
    if hidden.dim() != 2 or weight.shape[1:] != hidden.shape[1:] or targets.shape != hidden.shape[:1]:
        raise ValueError(
            "linear_logp: must get hidden [N, H], weight [V, H] and targets [N]; got "
            f"{tuple(hidden.shape)}, {tuple(weight.shape)} and {tuple(targets.shape)}"
        )
    room = workspace(hidden.device) if workspace_bytes is None else workspace_bytes
    found = LinearLogp.apply(hidden, weight, bias, targets, temperature, room, soft_cap, logit_scale, outputs)
    return TokenScores(*found)


def workspace(device: torch.device) -> int:
    """Bytes of logits held at once: less where the card is nearly full, since speed hardly depends on it."""
    if device.type != "cuda":
        return CPU_WORKSPACE
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
    ) -> tuple[torch.Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        rows_NH, weight_VH = hidden.to(dtype), weight.to(dtype)
        bias_V = None if bias is None else bias.to(dtype)
        scaling = Scaling(temperature, soft_cap, logit_scale)
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        early = need_hidden and not need_weight and not need_bias
        scores = Scores(rows_NH.shape[0], rows_NH, outputs)
        d_rows = torch.empty_like(rows_NH) if early else None
        logits_CV: torch.Tensor | None = None
        for part in _chunks(rows_NH.shape[0], weight_VH.shape[0] * rows_NH.element_size(), workspace_bytes, 128):
            if logits_CV is None:
                logits_CV = rows_NH.new_empty(part.stop - part.start, weight_VH.shape[0])
            logits = logits_CV[: part.stop - part.start]
            torch.mm(rows_NH[part], weight_VH.t(), out=logits)
            scores.fold(part, logits, targets[part], bias_V, scaling, early)
            if d_rows is not None:
                torch.mm(logits, weight_VH, out=d_rows[part])
        ctx.save_for_backward(hidden, weight, bias, targets, scores.lse, scores.entropy, d_rows)
        ctx.dtype, ctx.scaling, ctx.workspace_bytes = dtype, scaling, workspace_bytes
        ctx.mark_non_differentiable(*(x for x in (scores.square, scores.mean, scores.top) if x is not None))
        return scores.logp, scores.entropy, scores.square, scores.mean, scores.top

    @staticmethod
    def backward(
        ctx: Any, d_logp: torch.Tensor | None, d_entropy: torch.Tensor | None, *_: Any
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, lse, entropy, d_rows = ctx.saved_tensors
        if d_entropy is None and d_rows is not None:
            d_hidden = None if d_logp is None else (d_rows * d_logp.unsqueeze(-1)).to(hidden.dtype)
            return d_hidden, *(None,) * 8
        if d_logp is None and d_entropy is None:
            return (None,) * 9
        d_logp, d_entropy = (None if d is None else d.to(lse.dtype).contiguous() for d in (d_logp, d_entropy))
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        rows_NH, weight_VH = hidden.to(ctx.dtype), weight.to(ctx.dtype)
        bias_V = None if bias is None else bias.to(ctx.dtype)
        sums = torch.zeros(hidden.shape, dtype=lse.dtype, device=hidden.device) if need_hidden else None
        d_weight = torch.empty_like(weight) if need_weight else None
        d_bias = torch.empty_like(bias) if need_bias else None
        work: torch.Tensor | None = None
        for part in _chunks(
            weight.shape[0], max(rows_NH.shape[0], 1) * rows_NH.element_size(), ctx.workspace_bytes, 256
        ):
            if work is None:
                work = rows_NH.new_empty(rows_NH.shape[0], part.stop - part.start)
            tile = work[:, : part.stop - part.start]
            torch.mm(rows_NH, weight_VH[part].t(), out=tile)
            to_gradient(tile, part.start, targets, bias_V, lse, entropy, d_logp, d_entropy, ctx.scaling)
            if sums is not None:
                _accumulate(sums, tile, weight_VH[part])
            if d_weight is not None:
                d_weight[part] = tile.t() @ rows_NH
            if d_bias is not None:
                d_bias[part] = tile.sum(0, dtype=lse.dtype)
        return sums.to(hidden.dtype) if sums is not None else None, d_weight, d_bias, *(None,) * 6


def _chunks(count: int, each_bytes: int, most_bytes: int, step: int) -> list[slice]:
    """Even parts of `count` that each fit the memory: whole multiples of `step`, a product's tile, where they can be."""
    size = max(most_bytes // max(each_bytes, 1), 1)
    size = max(size // step * step, min(size, step)) if count > size else count
    return [slice(first, min(first + size, count)) for first in range(0, count, max(size, 1))]


def _accumulate(sums_NH: torch.Tensor, tile_NS: torch.Tensor, weight_SH: torch.Tensor) -> None:
    """`sums += tile @ weight`, added up in float32 also between slices."""
    if sums_NH.is_cuda and tile_NS.dtype in (torch.float16, torch.bfloat16):
        torch.addmm(sums_NH, tile_NS, weight_SH, out_dtype=torch.float32, out=sums_NH)
    else:
        sums_NH.addmm_(tile_NS.to(sums_NH.dtype), weight_SH.to(sums_NH.dtype))
