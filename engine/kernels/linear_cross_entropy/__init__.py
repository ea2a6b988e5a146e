"""Cross-entropy from hidden states and the head, never holding all logits.

The gradient is formed in the forward pass, beside the loss, so the logits of a chunk live once. Two plans:

- frozen head: chunks of rows. Two matrix products in all, one pass over each chunk's logits.
- trained head: slices of the vocabulary, so that each slice's weight gradient is one product over all rows and is
  rounded once. The slices' logits are needed twice (statistics, then gradient); what fits is kept in the memory that
  the weight gradient will take anyway, the rest is computed again.

Rows whose target is ignored are compacted away first. On CPU the plain-torch reference runs.
"""

from __future__ import annotations

import torch

from engine.kernels.device import kernel_serves, sums_in_float32
from engine.kernels.linear_cross_entropy.plan import frozen_head, trained_head
from engine.kernels.linear_cross_entropy.reference import linear_cross_entropy_reference
from engine.kernels.linear_logp import linear_logp
from engine.kernels.shapes import refuse_shapes

__all__ = ["linear_cross_entropy", "linear_cross_entropy_reference"]


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    soft_cap: float | None = None,
    logit_scale: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
    normaliser: float | torch.Tensor | None = None,
    workspace_bytes: int = 320 << 20,
) -> torch.Tensor:
    """`cross_entropy(hidden @ weight.T + bias, targets, reduction="sum") / normaliser` without the logits.

    Args:
        hidden: [N, H] float32, float16 or bfloat16; weight: [V, H] of the same dtype; targets: [N] int64.
        bias: [V] or None; a trained one goes to `linear_logp`, as do formats that differ and compiled code.
        soft_cap: logits become `soft_cap * tanh(logits / soft_cap)` (Gemma 2). logit_scale multiplies them first.
        label_smoothing, z_loss: as in torch and in PaLM (arXiv:2204.02311), both inside the mean.
        normaliser: what the summed loss is divided by; the number of kept targets when None.
        workspace_bytes: memory for logits beyond the returned gradients.

    Returns:
        A float32 scalar; zero, with zero gradients, when every target is ignored; NaN on a GPU for a target outside the
        vocabulary.

    Raises:
        ValueError: shapes that do not belong together. RuntimeError: a second backward pass through one loss on a GPU.

    Source: arXiv:2411.09009 (the loss without logits), arXiv:2410.10989 (gradient in the forward pass).
    """
    refuse_shapes("linear_cross_entropy", hidden, weight, targets, bias)
    settings = {
        "soft_cap": soft_cap,
        "logit_scale": logit_scale,
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "ignore_index": ignore_index,
    }
    compiling = torch.compiler.is_compiling()
    served = not compiling and kernel_serves(hidden, weight, targets) and hidden.dtype != torch.float64
    trained_bias = bias is not None and bias.requires_grad
    if compiling or (served and (trained_bias or hidden.dtype != weight.dtype)):
        each = linear_logp(hidden, weight, targets, bias=bias, outputs=("cross_entropy",), **settings).cross_entropy  # type: ignore[arg-type]
        assert each is not None
        return each.sum() / ((targets != ignore_index).sum().clamp(min=1) if normaliser is None else normaliser)
    if not served:
        return linear_cross_entropy_reference(
            hidden,
            weight,
            targets,
            bias=bias,
            normaliser=normaliser,
            **settings,  # type: ignore[arg-type]
        )
    return _LinearCrossEntropy.apply(hidden, weight, targets, bias, normaliser, workspace_bytes, settings)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, targets_N, bias_V, normaliser, workspace_bytes, settings):
        kept = (targets_N != settings["ignore_index"]).nonzero().squeeze(1)
        compact = kept.numel() < targets_N.numel()
        rows_NH = hidden_NH[kept] if compact else hidden_NH.contiguous()
        rows_N = targets_N[kept] if compact else targets_N.contiguous()
        bias_V = None if bias_V is None else bias_V.contiguous()
        count = max(rows_N.numel(), 1)
        divisor = count if normaliser is None else normaliser
        scale = torch.as_tensor(divisor, dtype=torch.float32, device=hidden_NH.device).reciprocal().reshape(1)
        # Divided by the normaliser, most gradients of float16 logits would lie below the smallest normal number. They are
        # formed larger, and what is missing joins in the backward pass, where a gradient scaler has spoken too.
        narrow = hidden_NH.dtype == torch.float16
        formed = torch.full_like(scale, 2.0 ** -(count.bit_length() // 2)) if narrow else scale
        ctx.rest = scale / formed if narrow else None
        ctx.compact, ctx.shape = kept if compact else None, hidden_NH.shape
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        if rows_N.numel() == 0:
            loss = torch.zeros(1, device=hidden_NH.device)
            d_hidden = torch.zeros_like(rows_NH) if need_hidden else None
            d_weight = torch.zeros_like(weight_VH) if need_weight else None
        else:
            given = rows_NH, weight_VH, rows_N, bias_V, formed, workspace_bytes, need_hidden, settings
            with sums_in_float32(hidden_NH.device):
                loss, d_hidden, d_weight = trained_head(*given) if need_weight else (*frozen_head(*given), None)
        ctx.save_for_backward(d_hidden, d_weight)
        return (loss * scale).squeeze(0)

    @staticmethod
    def backward(ctx, d_loss):
        d_hidden, d_weight = ctx.saved_tensors
        if getattr(ctx, "spent", False):
            raise RuntimeError(
                "linear_cross_entropy: its gradient was taken before, in the memory that held it. Compute the loss again."
            )
        ctx.spent = True
        d_loss = d_loss if ctx.rest is None else d_loss * ctx.rest
        if d_hidden is not None:
            _scale_in_place(d_hidden, d_loss)
            if ctx.compact is not None:
                d_hidden = d_hidden.new_zeros(ctx.shape).index_copy_(0, ctx.compact, d_hidden)
        if d_weight is not None:
            _scale_in_place(d_weight, d_loss)
        return d_hidden, d_weight, None, None, None, None, None


def _scale_in_place(gradient: torch.Tensor, d_loss: torch.Tensor) -> None:
    """`gradient *= d_loss`, free when `d_loss` is one; decided on the device, so nothing waits for the host."""
    from engine.kernels.linear_cross_entropy.kernels import scale_kernel

    block = 4096
    if gradient.numel():
        scale_kernel[(-(-gradient.numel() // block),)](
            gradient, d_loss.reshape(1).float().contiguous(), gradient.numel(), BLOCK=block
        )
