"""The gated activation of a SwiGLU or GeGLU block and its gradients, in plain torch: the truth for the kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")
"""`gelu_tanh` is the approximation that transformers calls gelu_pytorch_tanh, `gelu` the exact one (by erf)."""


def gated_reference(gate: torch.Tensor, up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """`act(gate) * up`, of one shape. Computes in float32 (float64 for float64 input), returns the input's dtype."""
    wide = torch.float64 if gate.dtype == torch.float64 else torch.float32
    return (_activation(gate.to(wide), activation) * up.to(wide)).to(gate.dtype)


def gated_gradients_reference(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str = "silu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `gate` and `up` for the result's gradient, and the result itself; rounded once each."""
    wide = torch.float64 if gate.dtype == torch.float64 else torch.float32
    with torch.enable_grad():
        x = gate.detach().to(wide).requires_grad_()
        act = _activation(x, activation)
    given, by = grad.to(wide), up.to(wide)
    (dgate,) = torch.autograd.grad(act, x, given * by)
    act = act.detach()
    return dgate.to(gate.dtype), (given * act).to(up.dtype), (act * by).to(gate.dtype)


def _activation(x: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
