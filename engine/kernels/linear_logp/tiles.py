"""What is done to a tile of logits: fold it into scores, or turn it into its gradient. Triton on CUDA, torch elsewhere.

Both overwrite the tile. Names: C rows of a chunk, S words of a slice, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels.device import kernel_serves


@dataclass(frozen=True)
class Scaling:
    """From raw logits to those of the distribution: `soft_cap * tanh(x * logit_scale / soft_cap) / temperature`."""

    temperature: float = 1.0
    soft_cap: float | None = None
    logit_scale: float = 1.0

    @property
    def numbers(self) -> tuple[float, float, float]:
        return self.logit_scale, self.soft_cap or 1.0, 1.0 / self.temperature

    def apply(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | float]:
        """z and dz/dx."""
        z = x * self.logit_scale
        if self.soft_cap is None:
            return z / self.temperature, self.logit_scale / self.temperature
        t = torch.tanh(z / self.soft_cap)
        return self.soft_cap * t / self.temperature, (1 - t * t) * (self.logit_scale / self.temperature)


class Scores:
    """The scores of N rows, filled in chunk by chunk."""

    def __init__(self, count: int, like: torch.Tensor, wanted: tuple[str, ...]) -> None:
        wide = torch.float64 if like.dtype == torch.float64 else torch.float32

        def fresh(name: str, dtype: torch.dtype = wide) -> torch.Tensor | None:
            return torch.empty(count, dtype=dtype, device=like.device) if name in wanted else None

        self.logp = torch.empty(count, dtype=wide, device=like.device)
        self.lse = torch.empty_like(self.logp)
        self.entropy, self.square, self.mean = fresh("entropy"), fresh("log_sum_sq_probs"), fresh("mean_logits")
        self.top = fresh("is_top1", torch.bool)

    def fold(
        self,
        part: slice,
        logits_CV: torch.Tensor,
        targets_C: torch.Tensor,
        bias_V: torch.Tensor | None,
        scaling: Scaling,
        gradient: bool,
    ) -> None:
        """Scores of the rows `part` from their whole logits, which become d logp / d logits where `gradient` is set."""
        run = _fold_triton if kernel_serves(logits_CV) and logits_CV.dtype != torch.float64 else _fold_torch
        run(self, part, logits_CV, targets_C, bias_V, scaling, gradient)


def _fold_torch(
    scores: Scores,
    part: slice,
    logits_CV: torch.Tensor,
    targets_C: torch.Tensor,
    bias_V: torch.Tensor | None,
    scaling: Scaling,
    gradient: bool,
) -> None:
    x = logits_CV.to(scores.lse.dtype)
    z, slope = scaling.apply(x if bias_V is None else x + bias_V)
    lse = z.logsumexp(-1, keepdim=True)
    scores.lse[part] = lse.squeeze(-1)
    scores.logp[part] = (z.gather(-1, targets_C.unsqueeze(-1)) - lse).squeeze(-1)
    if scores.mean is not None:
        scores.mean[part] = z.mean(-1)
    if scores.top is not None:
        scores.top[part] = z.argmax(-1) == targets_C
    if scores.square is not None:
        scores.square[part] = (2 * (z - lse)).logsumexp(-1)
    if scores.entropy is None and not gradient:
        return
    p = (z - lse).exp_()
    if scores.entropy is not None:
        scores.entropy[part] = lse.squeeze(-1) - torch.linalg.vecdot(p, z)
    if gradient:
        d = p.neg_()
        d.scatter_add_(-1, targets_C.unsqueeze(-1), torch.ones_like(lse))
        logits_CV.copy_(d * slope)


def _fold_triton(
    scores: Scores,
    part: slice,
    logits_CV: torch.Tensor,
    targets_C: torch.Tensor,
    bias_V: torch.Tensor | None,
    scaling: Scaling,
    gradient: bool,
) -> None:
    from engine.kernels.linear_logp.kernels import row_scores_kernel

    rows, vocabulary = logits_CV.shape
    spare = scores.lse

    def place(values: torch.Tensor | None) -> torch.Tensor:
        return spare if values is None else values[part]

    row_scores_kernel[(rows,)](
        logits_CV, targets_C, logits_CV if bias_V is None else bias_V, scores.logp[part], scores.lse[part],
        place(scores.entropy), place(scores.square), place(scores.mean), place(scores.top),
        logits_CV.stride(0), vocabulary, *scaling.numbers,
        HAS_BIAS=bias_V is not None, HAS_CAP=scaling.soft_cap is not None, WITH_ENTROPY=scores.entropy is not None,
        WITH_SQUARE=scores.square is not None, WITH_MEAN=scores.mean is not None, WITH_TOP=scores.top is not None,
        WITH_GRADIENT=gradient, LANES=_block(-(-vocabulary // 8), 512), RUN=8, num_warps=4,
    )  # fmt: skip


def to_gradient(
    logits_CS: torch.Tensor,
    first: int,
    targets_C: torch.Tensor,
    bias_V: torch.Tensor | None,
    lse_C: torch.Tensor,
    entropy_C: torch.Tensor | None,
    d_logp_C: torch.Tensor | None,
    d_entropy_C: torch.Tensor | None,
    scaling: Scaling,
) -> None:
    """The slice of logits that begins at word `first` becomes its gradient under these upstream gradients."""
    if kernel_serves(logits_CS) and logits_CS.dtype != torch.float64:
        from engine.kernels.linear_logp.kernels import scores_gradient_kernel

        rows, words = logits_CS.shape
        block = _block(words, 2048)
        scores_gradient_kernel[(rows, -(-words // block))](
            logits_CS, targets_C, logits_CS if bias_V is None else bias_V, lse_C,
            lse_C if entropy_C is None else entropy_C, lse_C if d_logp_C is None else d_logp_C,
            lse_C if d_entropy_C is None else d_entropy_C,
            logits_CS.stride(0), first, words, *scaling.numbers,
            HAS_BIAS=bias_V is not None, HAS_CAP=scaling.soft_cap is not None, WITH_LOGP=d_logp_C is not None,
            WITH_ENTROPY=d_entropy_C is not None, BLOCK_V=block, num_warps=4,
        )  # fmt: skip
        return
    words = logits_CS.shape[1]
    x = logits_CS.to(lse_C.dtype)
    z, slope = scaling.apply(x if bias_V is None else x + bias_V[first : first + words])
    logp = z - lse_C.unsqueeze(-1)
    p = logp.exp()
    d = torch.zeros_like(z)
    if d_logp_C is not None:
        d -= d_logp_C.unsqueeze(-1) * p
        here = (targets_C >= first) & (targets_C < first + words)
        at = (targets_C - first).clamp(0, words - 1).unsqueeze(-1)
        d.scatter_add_(-1, at, (d_logp_C * here).unsqueeze(-1))
    if d_entropy_C is not None and entropy_C is not None:
        d -= d_entropy_C.unsqueeze(-1) * p * (logp + entropy_C.unsqueeze(-1))
    logits_CS.copy_(d * slope)


def _block(n: int, most: int) -> int:
    return min(most, 1 << max(n - 1, 0).bit_length())
