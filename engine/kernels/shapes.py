"""What the ops from hidden states and a head refuse, in one sentence each, before anything is computed."""

from __future__ import annotations

import torch


def refuse_shapes(
    op: str, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Raises ValueError where these do not belong together or hold numbers that no product takes."""
    shapes = hidden.dim() == 2 and weight.shape[1:] == hidden.shape[1:] and targets.shape == hidden.shape[:1]
    if not shapes or (bias is not None and bias.shape != weight.shape[:1]):
        given = ", ".join(str(tuple(x.shape)) for x in (hidden, weight, targets, *(() if bias is None else (bias,))))
        raise ValueError(
            f"{op}: must get hidden [N, H], weight [V, H], targets [N] and a bias [V] or none; got {given}"
        )
    for name, x in (("hidden", hidden), ("weight", weight)):
        if x.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            kind = str(x.dtype).removeprefix("torch.")
            raise ValueError(
                f"{op}: {name} must be float64, float32, float16 or bfloat16; got {kind}. Convert it first."
            )
    if targets.dtype != torch.int64:
        raise ValueError(f"{op}: targets must be int64; got {str(targets.dtype).removeprefix('torch.')}. Use .long().")
    if len({hidden.device, weight.device, targets.device}) > 1:
        raise ValueError(
            f"{op}: hidden, weight and targets must lie on one device; got {hidden.device}, {weight.device} and "
            f"{targets.device}. Move them to {hidden.device}."
        )
