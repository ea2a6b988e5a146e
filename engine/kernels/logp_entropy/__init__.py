"""Log-probabilities of targets and entropies from logits, one pass over the logits each way.

Serves logits of any stride: a slice such as `logits[:, :-1]` or a transposed view is read where it lies. Refuses
float64 and shapes whose leading dimensions cannot be viewed as two. On CPU the plain-torch reference runs.
"""

from __future__ import annotations

import torch

from engine.kernels.device import kernel_serves
from engine.kernels.logp_entropy.reference import logp_entropy_reference

__all__ = ["logp_entropy", "logp_entropy_reference"]

# Measured on one H100 at V=151,936, 16,384 rows: forward 1.63 ms at 512 lanes of 8 words (1.87 at 1,024 with 4 warps),
# backward 3.57 ms at 1,024 words a program (4.28 at 8,192).
_FORWARD_LANES, _FORWARD_RUN, _FORWARD_WARPS = 512, 8, 4
_BACKWARD_BLOCK, _BACKWARD_WARPS = 1024, 4


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
        inplace_gradient: backward overwrites `logits` with their gradient and so needs no new memory. Nothing else
            may read the logits afterwards.

    Returns:
        Two float32 tensors shaped like `targets`; the second is None without `entropy`.

    Raises:
        ValueError: shapes that do not belong together, or leading dimensions that cannot be viewed as two.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets: must be shaped like the logits' rows {tuple(logits.shape[:-1])}; got {tuple(targets.shape)}"
        )
    if not kernel_serves(logits, targets) or logits.dtype == torch.float64 or targets.numel() == 0:
        logp, spread = logp_entropy_reference(logits, targets, temperature=temperature, ignore_index=ignore_index)
        return logp, spread if entropy else None
    rows = _as_two_leading(logits)
    logp, spread = _LogpEntropy.apply(
        rows, targets.reshape(-1).contiguous(), temperature, entropy, ignore_index, inplace_gradient
    )
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
        from engine.kernels.logp_entropy.kernels import LOG2E, logp_entropy_fwd_kernel

        time, vocabulary = logits_BTV.shape[1:]
        rows = targets_R.numel()
        logp, lse = (torch.empty(rows, dtype=torch.float32, device=logits_BTV.device) for _ in range(2))
        entropy = torch.empty_like(logp) if with_entropy else logp.new_empty(0)
        lanes = min(_FORWARD_LANES, _power_of_two(-(-vocabulary // _FORWARD_RUN)))
        logp_entropy_fwd_kernel[(rows,)](
            logits_BTV, targets_R, logp, entropy, lse,
            time, vocabulary, *logits_BTV.stride(), LOG2E.value / temperature, ignore_index,
            WITH_ENTROPY=with_entropy, LANES=lanes, RUN=_FORWARD_RUN, num_warps=_FORWARD_WARPS,
        )  # fmt: skip
        ctx.save_for_backward(logits_BTV, targets_R, lse, entropy)
        ctx.settings = temperature, with_entropy, ignore_index, inplace_gradient
        return logp, entropy

    @staticmethod
    def backward(ctx, dlogp, dentropy):
        from engine.kernels.logp_entropy.kernels import LOG2E, logp_entropy_bwd_kernel

        logits_BTV, targets_R, lse, entropy = ctx.saved_tensors
        temperature, with_entropy, ignore_index, inplace_gradient = ctx.settings
        time, vocabulary = logits_BTV.shape[1:]
        gradient = logits_BTV.detach() if inplace_gradient else torch.empty_like(logits_BTV)
        block = min(_BACKWARD_BLOCK, _power_of_two(vocabulary))
        grid = (targets_R.numel(), -(-vocabulary // block))
        logp_entropy_bwd_kernel[grid](
            logits_BTV, targets_R, lse, entropy, dlogp.contiguous(), dentropy.contiguous(), gradient,
            time, vocabulary, *logits_BTV.stride(), *gradient.stride(), LOG2E.value / temperature, 1.0 / temperature,
            ignore_index, WITH_ENTROPY=with_entropy, BLOCK_V=block, num_warps=_BACKWARD_WARPS,
        )  # fmt: skip
        return gradient, None, None, None, None, None


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 1 else 1
