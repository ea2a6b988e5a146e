"""What the ops refuse, in one sentence each: shapes and formats before anything is computed, second derivatives after."""

from __future__ import annotations

import torch

FORMATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""The number formats that ops take; float64 goes to the references."""


def named(dtype: torch.dtype) -> str:
    """The format as people write it, `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def refuse_formats(op: str, **tensors: torch.Tensor | None) -> None:
    """Raises ValueError for a tensor in a format that no op takes, or on another device than the first."""
    first = None
    for name, x in tensors.items():
        if x is None:
            continue
        if x.dtype not in FORMATS:
            raise ValueError(
                f"{op}: {name} must be float64, float32, float16 or bfloat16; got {named(x.dtype)}. Convert it first."
            )
        first = x.device if first is None else first
        if x.device != first:
            raise ValueError(f"{op}: {name} must lie on {first} as the others do; got {x.device}. Move it there.")


def refuse_scaling(op: str, temperature: float, soft_cap: float | None, label_smoothing: float, z_loss: float) -> None:
    """Raises ValueError for numbers under which a distribution or its loss has no meaning."""
    if not 0 < temperature < float("inf"):
        raise ValueError(f"{op}: temperature must be above 0 and finite; got {temperature}. 1.0 changes nothing.")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"{op}: soft_cap must be above 0, or None for no cap; got {soft_cap}.")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{op}: label_smoothing must lie between 0 and 1; got {label_smoothing}.")
    if not z_loss >= 0:
        raise ValueError(f"{op}: z_loss must be 0 or more; got {z_loss}.")


def first_derivatives_alone(op: str) -> None:
    """For the start of a backward pass. Raises RuntimeError where it is to be differentiated itself, which it cannot be."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{op}: its gradient cannot be differentiated again (create_graph=True). {op}_reference can be."
        )


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
    if not weight.shape[0]:
        raise ValueError(f"{op}: weight must hold a vocabulary of at least one word; got {tuple(weight.shape)}")
    refuse_formats(op, hidden=hidden, weight=weight, bias=bias)
    if targets.dtype != torch.int64 or targets.device != hidden.device:
        raise ValueError(
            f"{op}: targets must be int64 on {hidden.device}; got {named(targets.dtype)} on {targets.device}. "
            "Use .long() and .to(device)."
        )
