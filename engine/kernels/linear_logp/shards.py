"""The op for a head that is cut by words over the processes of a group, as tensor-parallel training lays it out.

Each process holds its words' rows of the head and all hidden states. Three numbers a row travel in the forward pass (the
shard's log of sum of exponentials, its mean logit under its own probabilities and the target's logit, zero where the
target lies elsewhere) and the gradient of the hidden states in the backward pass; no logit does. Gathered and added in the
order of ranks, so every process gets the same bits. All processes must bring the same upstream gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from engine.kernels.device import kernel_serves
from engine.kernels.linear_logp.passes import Forward, backward_pass, forward_pass, working_type
from engine.kernels.linear_logp.reference import TokenScores
from engine.kernels.linear_logp.tiles import Scaling, Upstream
from engine.kernels.shapes import first_derivatives_alone, refuse_scaling, refuse_shapes

_NEEDED = ("entropy", "mean_logits")


class Normaliser(NamedTuple):
    """What the whole vocabulary says about each row, [N]: log of the sum, entropy, target's logit, mean logit."""

    lse: torch.Tensor
    entropy: torch.Tensor
    target: torch.Tensor
    mean: torch.Tensor


def shard_statistics(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    scaling: Scaling,
    first: int,
    workspace_bytes: int,
) -> torch.Tensor:
    """[4, N] of one shard, whose words begin at `first`: lse, mean logit by probability, target's logit, sum of logits."""
    there = targets - first
    found: Forward = forward_pass(
        hidden, weight, bias, there, scaling, _NEEDED, workspace_bytes, early=False, whole=False
    )
    scores = found.scores
    assert scores.entropy is not None
    assert scores.mean is not None
    here = (there >= 0) & (there < weight.shape[0])
    target = torch.where(here, scores.logp + scores.lse, 0.0)
    return torch.stack([scores.lse, scores.lse - scores.entropy, target, scores.mean * weight.shape[0]])


def combine(shards: torch.Tensor, vocabulary: int) -> Normaliser:
    """The whole from the shards' [K, 4, N]; equals the statistics of one head of `vocabulary` words."""
    lse_KN, lean_KN, target_KN, sum_KN = shards.unbind(1)
    lse = lse_KN.logsumexp(0)
    entropy = lse - ((lse_KN - lse).exp() * lean_KN).sum(0)
    return Normaliser(lse, entropy, target_KN.sum(0), sum_KN.sum(0) / vocabulary)


def linear_logp_sharded(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    bias: torch.Tensor | None = None,
    scaling: Scaling | None = None,
    workspace_bytes: int = 16 << 20,
) -> TokenScores:
    """`linear_logp` with `weight` [V of this process, H], the ranks' shards in order; shards may differ in size.

    Gives log-probability, entropy and cross-entropy, each differentiable by hidden states, shard and bias. Refuses what
    `linear_logp` does; a target that is in no shard makes its row NaN on a GPU and raises IndexError on a CPU.
    """
    scaling = scaling or Scaling()
    refuse_shapes("linear_logp_sharded", hidden, weight, targets, bias)
    refuse_scaling(
        "linear_logp_sharded", scaling.temperature, scaling.soft_cap, scaling.label_smoothing, scaling.z_loss
    )
    logp, entropy, loss = _Sharded.apply(hidden, weight, bias, targets, group, scaling, workspace_bytes)
    return TokenScores(logp, entropy, None, None, None, loss)


class _Sharded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        group: dist.ProcessGroup,
        scaling: Scaling,
        workspace_bytes: int,
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        sizes = [torch.zeros(1, dtype=torch.int64, device=weight.device) for _ in range(world)]
        dist.all_gather(sizes, torch.tensor([weight.shape[0]], device=weight.device), group=group)
        words = [int(size) for size in sizes]
        first, vocabulary = sum(words[:rank]), sum(words)
        outside = _outside(targets, vocabulary)
        own = shard_statistics(hidden, weight, bias, targets, scaling, first, workspace_bytes)
        every = [torch.empty_like(own) for _ in range(world)]
        dist.all_gather(every, own, group=group)
        lse, entropy, target, mean = combine(torch.stack(every), vocabulary)
        for each in (lse, entropy):
            each.masked_fill_(outside, float("nan"))
        loss = scaling.cross_entropy(lse, target, mean)
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy)
        ctx.settings = group, scaling, working_type(hidden), workspace_bytes, first, vocabulary
        return target - lse, entropy.clone(), loss

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        first_derivatives_alone("linear_logp")
        hidden, weight, bias, targets, lse, entropy = ctx.saved_tensors
        group, scaling, dtype, workspace_bytes, first, vocabulary = ctx.settings
        d_hidden, d_weight, d_bias = backward_pass(
            hidden, weight, bias, targets, lse, entropy, Upstream(*upstream), scaling, dtype, workspace_bytes,
            ctx.needs_input_grad[:3], first=first, vocabulary=vocabulary,
        )  # fmt: skip
        if d_hidden is not None:
            dist.all_reduce(d_hidden, group=group)
        return d_hidden, d_weight, d_bias, None, None, None, None


def _outside(targets: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Which targets are in no shard; on a CPU, where looking costs nothing, none may be."""
    outside = (targets < 0) | (targets >= vocabulary)
    if not kernel_serves(targets) and outside.any():
        raise IndexError(f"a target lies outside of the vocabulary of {vocabulary} words")
    return outside
