"""The op as registered operations, which `torch.compile(fullgraph=True)` keeps whole in one graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.kernels.logp_entropy.launch import backward, forward


@torch.library.custom_op("workbench::logp_entropy", mutates_args=())
def logp_entropy_op(
    logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor]:
    return forward(logits, targets, temperature, with_entropy, ignore_index)


@torch.library.custom_op("workbench::logp_entropy_backward", mutates_args=())
def logp_entropy_backward_op(
    dlogp: Tensor, dentropy: Tensor, logits: Tensor, targets: Tensor, lse: Tensor, entropy: Tensor,
    temperature: float, with_entropy: bool, ignore_index: int,
) -> Tensor:  # fmt: skip
    gradient = torch.empty_like(logits)
    backward(gradient, dlogp, dentropy, logits, targets, lse, entropy, temperature, with_entropy, ignore_index)
    return gradient


@logp_entropy_op.register_fake
def _(logits, targets, temperature, with_entropy, ignore_index):
    rows = targets.shape[0]
    one, two = (logits.new_empty(rows, dtype=torch.float32) for _ in range(2))
    return one, logits.new_empty(rows if with_entropy else 0, dtype=torch.float32), two


@logp_entropy_backward_op.register_fake
def _(dlogp, dentropy, logits, targets, lse, entropy, temperature, with_entropy, ignore_index):
    return torch.empty_like(logits)


def _remember(ctx: Any, inputs: Any, output: Any) -> None:
    logits, targets, *ctx.settings = inputs
    _logp, entropy, lse = output
    ctx.save_for_backward(logits, targets, lse, entropy)


def _differentiate(ctx: Any, dlogp: Tensor, dentropy: Tensor, _lse: Tensor) -> Any:
    return logp_entropy_backward_op(dlogp, dentropy, *ctx.saved_tensors, *ctx.settings), None, None, None, None


logp_entropy_op.register_autograd(_differentiate, setup_context=_remember)
