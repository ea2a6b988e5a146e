"""Log-probabilities of targets and entropies from logits, one pass over the logits each way.

Serves logits of any stride: a slice such as `logits[:, :-1]` or a transposed view is read where it lies. Refuses
integers and shapes whose leading dimensions cannot be viewed as two. On CPU, and for float64, the plain-torch reference
runs. Compiled code gets a registered operation (`registered`).
"""

from __future__ import annotations

import torch

from engine.kernels.device import kernel_serves
from engine.kernels.logp_entropy.launch import backward, forward
from engine.kernels.logp_entropy.reference import logp_entropy_reference
from engine.kernels.shapes import first_derivatives_alone, named, refuse_formats, refuse_scaling

__all__ = ["logp_entropy", "logp_entropy_reference"]


def logp_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = True,
    ignore_index: int = -100,
    inplace_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`log_softmax(logits / temperature).gather(targets)` and, with `entropy`, `-(p * log p).sum(-1)`.

    Args:
        logits: [..., V], float32, float16 or bfloat16, any strides; V at least 1.
        targets: [...] int64 in [0, V), or `ignore_index` for rows that give zero and no gradient.
        inplace_gradient: backward overwrites `logits` with their gradient and so needs no new memory. Whatever needs
            the logits afterwards, a second backward pass too, gets torch's error about a changed tensor. Compiled code,
            which owns its memory, and plain torch make a new gradient.

    Returns:
        Two float32 tensors shaped like `targets`; the second is None without `entropy`. On a GPU a target outside the
        vocabulary makes its row NaN.

    Raises:
        ValueError: shapes, formats, devices or a temperature that do not belong together, leading dimensions that
            cannot be viewed as two, expanded logits that are to be overwritten. RuntimeError: a second derivative.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets: must be shaped like the logits' rows {tuple(logits.shape[:-1])}; got {tuple(targets.shape)}"
        )
    if not logits.dim() or not logits.shape[-1]:
        raise ValueError(f"logits: must have a vocabulary of at least one word; got {tuple(logits.shape)}")
    refuse_formats("logp_entropy", logits=logits)
    refuse_scaling("logp_entropy", temperature, None, 0.0, 0.0)
    if targets.dtype != torch.int64 or targets.device != logits.device:
        given = f"{named(targets.dtype)} on {targets.device}"
        raise ValueError(f"targets: must be int64 on {logits.device}; got {given}. Use .long() and .to(logits.device).")
    if inplace_gradient and any(
        step == 0 and size > 1 for step, size in zip(logits.stride(), logits.shape, strict=True)
    ):
        raise ValueError(
            f"logits: must not be expanded (strides {logits.stride()}) where their gradient is written over them. Pass a "
            "copy, or leave inplace_gradient out."
        )
    compiling = torch.compiler.is_compiling()
    served = logits.is_cuda if compiling else kernel_serves(logits, targets)
    if not served or logits.dtype == torch.float64 or targets.numel() == 0:
        logp, spread = logp_entropy_reference(logits, targets, temperature=temperature, ignore_index=ignore_index)
        return logp, spread if entropy else None
    rows = _as_two_leading(logits)
    flat = targets.reshape(-1).contiguous()
    if compiling:
        from engine.kernels.logp_entropy.registered import logp_entropy_op

        logp, spread, _lse = logp_entropy_op(rows, flat, temperature, entropy, ignore_index)
    else:
        logp, spread = _LogpEntropy.apply(rows, flat, temperature, entropy, ignore_index, inplace_gradient)
    return logp.view(targets.shape), spread.view(targets.shape) if entropy else None


def _as_two_leading(logits: torch.Tensor) -> torch.Tensor:
    """[..., V] as [B, T, V] without a copy."""
    if logits.dim() == 3:
        return logits
    if logits.dim() == 1:
        return logits[None, None]
    if logits.dim() == 2:
        return logits[None]
    try:
        return logits.view(-1, *logits.shape[-2:])
    except RuntimeError:
        raise ValueError(
            f"logits: leading dimensions of shape {tuple(logits.shape)} and strides {logits.stride()} cannot be viewed "
            "as two. Pass a contiguous tensor."
        ) from None


class _LogpEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_BTV, targets_R, temperature, with_entropy, ignore_index, inplace_gradient):
        logp, entropy, lse = forward(logits_BTV, targets_R, temperature, with_entropy, ignore_index)
        ctx.save_for_backward(logits_BTV, targets_R, lse, entropy)
        ctx.settings = temperature, with_entropy, ignore_index
        ctx.inplace_gradient = inplace_gradient
        return logp, entropy

    @staticmethod
    def backward(ctx, dlogp, dentropy):
        first_derivatives_alone("logp_entropy")
        logits_BTV, *rest = ctx.saved_tensors  # a checkpoint hands them out once
        gradient = logits_BTV.detach() if ctx.inplace_gradient else torch.empty_like(logits_BTV)
        backward(gradient, dlogp, dentropy, logits_BTV, *rest, *ctx.settings)
        if ctx.inplace_gradient:
            torch.autograd.graph.increment_version(gradient)
        return gradient, None, None, None, None, None
