"""A gated activation of two sums of a wide and a low-rank product, and its gradients, in plain torch: the truth for the kernel."""

from __future__ import annotations

import math

import torch

from engine.kernels.gated.reference import gated_reference

Thin = tuple[torch.Tensor, torch.Tensor] | None
"""The factors of a low-rank product: [..., R] and [I, R], or none."""


def total(wide: torch.Tensor, thin: Thin) -> torch.Tensor:
    """`wide + inner @ outer.T` [..., I] in float32, float64 for float64; rounded nowhere."""
    found = wide.to(_format(wide))
    return found if thin is None else found + thin[0].to(found.dtype) @ thin[1].to(found.dtype).t()


def gated_sums_reference(
    gate: torch.Tensor, gate_thin: Thin, up: torch.Tensor, up_thin: Thin, activation: str = "silu"
) -> torch.Tensor:
    """`act(gate + its product) * (up + its product)`, rounded once to the format of `gate`."""
    return gated_reference(total(gate, gate_thin), total(up, up_thin), activation).to(gate.dtype)


def gated_sums_gradients_reference(
    grad: torch.Tensor, grad_thin: Thin, gate: torch.Tensor, gate_thin: Thin, up: torch.Tensor, up_thin: Thin,
    activation: str = "silu",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of both sums for the result's gradient, itself a sum, the result, and what of them leads into the factors
    [..., sum of R]: `dgate @ outer_g`, `dup @ outer_u`, `result @ outer` of the gradient's; each rounded once."""
    given, x, by = total(grad, grad_thin), total(gate, gate_thin), total(up, up_thin)
    act = gated_reference(x, torch.ones_like(x), activation)
    dgate, dup, product = (each.to(gate.dtype) for each in (given * by * _slope(x, activation), given * act, act * by))
    pairs = ((dgate, gate_thin), (dup, up_thin), (product, grad_thin))
    return dgate, dup, product, torch.cat([led_inwards(wide, thin) for wide, thin in pairs], -1)


def led_inwards(wide: torch.Tensor, thin: Thin) -> torch.Tensor:
    """`wide @ outer` [..., R], summed in float32 and rounded once; nothing [..., 0] without factors."""
    if thin is None:
        return wide.new_empty(*wide.shape[:-1], 0)
    return (wide.to(_format(wide)) @ thin[1].to(_format(wide))).to(wide.dtype)


def _format(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _slope(x: torch.Tensor, activation: str) -> torch.Tensor:
    """The activation's derivative; in closed form, since an operation's backward pass records nothing of its own."""
    if activation == "silu":
        share = x.sigmoid()
        return share * (1 + x * (1 - share))
    if activation == "gelu":
        return 0.5 * (1 + (x * 0.5**0.5).erf()) + x * (-0.5 * x * x).exp() / (2 * math.pi) ** 0.5
    once, cubed = (2 / math.pi) ** 0.5, 0.044715
    share = (once * (x + cubed * x**3)).tanh()
    return 0.5 * (1 + share) + 0.5 * x * (1 - share * share) * once * (1 + 3 * cubed * x * x)
