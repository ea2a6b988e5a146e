"""What is done to a tile of logits: fold it into scores, or turn it into its gradient. Triton on CUDA, torch elsewhere.

Both overwrite the tile. Names: C rows of a chunk, S words of a slice, V vocabulary. A tile may also be the whole of one
shard of the vocabulary; a target may then lie in another (`engine.kernels.linear_logp.shards`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from engine.kernels.device import kernel_serves
from engine.kernels.tuner import TUNER, Cost, Key, Tile, Tiles, bucket


@dataclass(frozen=True)
class Scaling:
    """From raw logits to those of the distribution: `soft_cap * tanh(x * logit_scale / soft_cap) / temperature`.

    `label_smoothing` and `z_loss` are of the cross-entropy: `lse - (1 - s) z_target - s mean z + zeta lse**2`.
    """

    temperature: float = 1.0
    soft_cap: float | None = None
    logit_scale: float = 1.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    @property
    def numbers(self) -> tuple[float, float, float, float, float]:
        return self.logit_scale, self.soft_cap or 1.0, 1.0 / self.temperature, self.label_smoothing, self.z_loss

    def apply(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | float]:
        """z and dz/dx."""
        z = x * self.logit_scale
        if self.soft_cap is None:
            return z / self.temperature, self.logit_scale / self.temperature
        t = torch.tanh(z / self.soft_cap)
        return self.soft_cap * t / self.temperature, (1 - t * t) * (self.logit_scale / self.temperature)

    def cross_entropy(self, lse: torch.Tensor, z_target: torch.Tensor, z_mean: torch.Tensor) -> torch.Tensor:
        """The loss of each row. A word that cannot come makes the mean infinite, which counts only under smoothing."""
        loss = lse - (1 - self.label_smoothing) * z_target + self.z_loss * lse.square()
        return loss - self.label_smoothing * z_mean if self.label_smoothing else loss


class Scores:
    """The scores of N rows, filled in chunk by chunk. Not `whole`: the logits are one shard of the vocabulary."""

    def __init__(self, count: int, like: torch.Tensor, wanted: tuple[str, ...], *, whole: bool = True) -> None:
        wide = torch.float64 if like.dtype == torch.float64 else torch.float32

        def fresh(name: str, dtype: torch.dtype = wide) -> torch.Tensor | None:
            return torch.empty(count, dtype=dtype, device=like.device) if name in wanted else None

        self.whole = whole
        self.logp = torch.empty(count, dtype=wide, device=like.device)
        self.lse = torch.empty_like(self.logp)
        self.entropy, self.square, self.mean = fresh("entropy"), fresh("log_sum_sq_probs"), fresh("mean_logits")
        self.top, self.loss = fresh("is_top1", torch.bool), fresh("cross_entropy")

    def sums(self, scaling: Scaling) -> bool:
        """Whether the sum of a row's logits is needed; a kernel pays for it in registers."""
        return self.mean is not None or (self.loss is not None and scaling.label_smoothing > 0)

    def fold(
        self,
        part: slice,
        logits_CV: torch.Tensor,
        targets_C: torch.Tensor,
        bias_V: torch.Tensor | None,
        scaling: Scaling,
        gradient: bool,
    ) -> None:
        """Scores of the rows `part` from their whole logits, which become a gradient where `gradient` is set.

        It is that of the cross-entropy by the logits where that is wanted, else of the log-probability.
        """
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
    z_target = _of_target(z, targets_C, scores.whole).unsqueeze(-1)
    scores.lse[part] = lse.squeeze(-1)
    scores.logp[part] = (z_target - lse).squeeze(-1)
    if scores.mean is not None:
        scores.mean[part] = z.mean(-1)
    if scores.top is not None:
        scores.top[part] = z.argmax(-1) == targets_C
    if scores.square is not None:
        scores.square[part] = (2 * (z - lse)).logsumexp(-1)
    smoothing = scaling.label_smoothing
    if scores.loss is not None:
        scores.loss[part] = scaling.cross_entropy(lse, z_target, z.mean(-1, keepdim=True)).squeeze(-1)
    if scores.entropy is None and not gradient:
        return
    p = (z - lse).exp_()
    if scores.entropy is not None:
        # A word that cannot come adds nothing, where zero times its infinite logit would be NaN.
        scores.entropy[part] = lse.squeeze(-1) - torch.linalg.vecdot(p, _finite_(z))
    if gradient and scores.loss is None:
        d = p.neg_()
        d.scatter_add_(-1, targets_C.unsqueeze(-1), torch.ones_like(lse))
        logits_CV.copy_(d * slope)
    elif gradient:
        d = p.mul_(1 + 2 * scaling.z_loss * lse).sub_(smoothing / z.shape[-1])
        d.scatter_add_(-1, targets_C.unsqueeze(-1), torch.full_like(lse, smoothing - 1))
        logits_CV.copy_(d * slope)


def _finite_(x: torch.Tensor) -> torch.Tensor:
    """x with nought in place of minus infinity, in its own memory."""
    return x.nan_to_num_(nan=float("nan"), posinf=float("inf"), neginf=0.0)


def _of_target(z_CV: torch.Tensor, targets_C: torch.Tensor, whole: bool) -> torch.Tensor:
    """Each row's logit of its target; zero where that lies in another shard."""
    if whole:
        return z_CV.gather(-1, targets_C.unsqueeze(-1)).squeeze(-1)
    here = (targets_C >= 0) & (targets_C < z_CV.shape[-1])
    found = z_CV.gather(-1, targets_C.masked_fill(~here, 0).unsqueeze(-1)).squeeze(-1)
    return found.masked_fill(~here, 0)


def row_cost(tile: Tile, registers: int = 9) -> Cost:
    """Compiled for an H100 a thread takes 4.5 registers a logit that it holds; a cap or more outputs double that."""
    lanes, run, warps = tile
    return Cost(24 + registers * (lanes * run // (32 * warps)) // 2, 32 * warps, 1024)


ROW_TILES = Tiles(
    "linear_logp_rows", 2, ("lanes", "run", "warps"),
    ((512, 8, 8), (512, 8, 4), (256, 8, 4), (1024, 8, 8), (512, 4, 4), (256, 16, 4)), row_cost,
)  # fmt: skip
CROWDED_ROW_TILES = replace(ROW_TILES, kernel="linear_logp_crowded_rows", cost=lambda tile: row_cost(tile, 21))
"""With a cap or sums of more outputs, for which large tiles spill registers."""
CROWDING = ("HAS_CAP", "WITH_SQUARE", "WITH_TOP", "WITH_SUM")


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

    flags: dict[str, bool] = {
        "HAS_BIAS": bias_V is not None, "HAS_CAP": scaling.soft_cap is not None,
        "WITH_ENTROPY": scores.entropy is not None, "WITH_SQUARE": scores.square is not None,
        "WITH_SUM": scores.sums(scaling), "WITH_MEAN": scores.mean is not None, "WITH_TOP": scores.top is not None,
        "WITH_LOSS": scores.loss is not None, "WITH_GRADIENT": gradient, "WHOLE": scores.whole,
    }  # fmt: skip

    def launch(tile: Tile, logits: torch.Tensor) -> None:
        lanes, run, warps = tile
        row_scores_kernel[(rows,)](
            logits, targets_C, logits if bias_V is None else bias_V, scores.logp[part], scores.lse[part],
            place(scores.entropy), place(scores.square), place(scores.mean), place(scores.top), place(scores.loss),
            logits.stride(0), vocabulary, *scaling.numbers,
            **flags, LANES=block(-(-vocabulary // run), lanes), RUN=run, num_warps=warps,
        )  # fmt: skip

    key: Key = (bucket(rows), bucket(vocabulary), str(logits_CV.dtype), *(int(flag) for flag in flags.values()))
    crowded = any(flags[name] for name in CROWDING)
    tiles = CROWDED_ROW_TILES if crowded else ROW_TILES
    launch(TUNER.pick(tiles, key, logits_CV.device, on_scratch(launch, logits_CV)), logits_CV)


GRADIENT_TILES = Tiles(
    "linear_logp_gradient", 1, ("block", "warps"), ((2048, 4), (1024, 4), (1024, 2), (2048, 8), (4096, 8)),
    lambda tile: Cost(32 + 2 * tile[0] // (32 * tile[1]), 32 * tile[1]),
)  # fmt: skip


def to_gradient(
    logits_CS: torch.Tensor,
    out_CS: torch.Tensor,
    first: int,
    vocabulary: int,
    targets_C: torch.Tensor,
    bias_S: torch.Tensor | None,
    lse_C: torch.Tensor,
    entropy_C: torch.Tensor | None,
    upstream: Upstream,
    scaling: Scaling,
) -> None:
    """The gradient of the slice of logits that begins at word `first`, into `out_CS`, which may be the logits."""
    run = _gradient_triton if kernel_serves(logits_CS) and logits_CS.dtype != torch.float64 else _gradient_torch
    run(logits_CS, out_CS, first, vocabulary, targets_C, bias_S, lse_C, entropy_C, upstream, scaling)


class Upstream(NamedTuple):
    """Gradients by log-probability, entropy and cross-entropy, [N] each; None where none came."""

    logp: torch.Tensor | None
    entropy: torch.Tensor | None
    loss: torch.Tensor | None

    def any(self) -> bool:
        return any(each is not None for each in self)


def _gradient_triton(
    logits_CS: torch.Tensor,
    out_CS: torch.Tensor,
    first: int,
    vocabulary: int,
    targets_C: torch.Tensor,
    bias_S: torch.Tensor | None,
    lse_C: torch.Tensor,
    entropy_C: torch.Tensor | None,
    upstream: Upstream,
    scaling: Scaling,
) -> None:
    from engine.kernels.linear_logp.kernels import scores_gradient_kernel

    rows, words = logits_CS.shape
    flags: dict[str, bool] = {
        "HAS_BIAS": bias_S is not None, "HAS_CAP": scaling.soft_cap is not None, "WITH_LOGP": upstream.logp is not None,
        "WITH_ENTROPY": upstream.entropy is not None, "WITH_LOSS": upstream.loss is not None,
    }  # fmt: skip
    upstreams = [lse_C if each is None else each for each in (entropy_C, *upstream)]

    def launch(tile: Tile, out: torch.Tensor) -> None:
        most, warps = tile
        width = block(words, most)
        scores_gradient_kernel[(rows, -(-words // width))](
            logits_CS, out, targets_C, logits_CS if bias_S is None else bias_S, lse_C, *upstreams,
            logits_CS.stride(0), out.stride(0), first, words, vocabulary, *scaling.numbers,
            **flags, BLOCK_V=width, num_warps=warps,
        )  # fmt: skip

    key: Key = (bucket(rows), bucket(words), str(logits_CS.dtype), *(int(flag) for flag in flags.values()))
    launch(TUNER.pick(GRADIENT_TILES, key, logits_CS.device, on_scratch(launch, out_CS)), out_CS)


def _gradient_torch(
    logits_CS: torch.Tensor,
    out_CS: torch.Tensor,
    first: int,
    vocabulary: int,
    targets_C: torch.Tensor,
    bias_S: torch.Tensor | None,
    lse_C: torch.Tensor,
    entropy_C: torch.Tensor | None,
    upstream: Upstream,
    scaling: Scaling,
) -> None:
    words = logits_CS.shape[1]
    x = logits_CS.to(lse_C.dtype)
    z, slope = scaling.apply(x if bias_S is None else x + bias_S)
    logp = z - lse_C.unsqueeze(-1)
    p = logp.exp()
    d = torch.zeros_like(z)
    here = (targets_C >= first) & (targets_C < first + words)
    at = (targets_C - first).clamp(0, words - 1).unsqueeze(-1)
    if upstream.logp is not None:
        d -= upstream.logp.unsqueeze(-1) * p
        d.scatter_add_(-1, at, (upstream.logp * here).unsqueeze(-1))
    if upstream.entropy is not None and entropy_C is not None:
        d -= upstream.entropy.unsqueeze(-1) * p * (_finite_(logp) + entropy_C.unsqueeze(-1))
    if upstream.loss is not None:
        each = upstream.loss.unsqueeze(-1)
        d += each * (p * (1 + 2 * scaling.z_loss * lse_C.unsqueeze(-1)) - scaling.label_smoothing / vocabulary)
        d.scatter_add_(-1, at, (scaling.label_smoothing - 1) * each * here.unsqueeze(-1))
    out_CS.copy_(d * slope)


def on_scratch(launch: Callable[[Tile, torch.Tensor], None], overwritten: torch.Tensor) -> Callable[[Tile], None]:
    """The launch on a copy of what it overwrites; the copy is made when first something is timed."""
    copies: list[torch.Tensor] = []

    def run(tile: Tile) -> None:
        if not copies:
            copies.append(overwritten.clone())
        launch(tile, copies[0])

    return run


def block(n: int, most: int) -> int:
    """The power of two at or above `n`, at most `most`."""
    return min(most, 1 << max(n - 1, 0).bit_length())
