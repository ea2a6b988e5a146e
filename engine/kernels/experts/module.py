"""Experts as transformers' modules keep them: whether `expert_mlp` serves one, and its forward pass by it.

Modules are read by the attributes that transformers gives all of them (`gate_up_proj` and `down_proj`, `has_gate`,
`has_bias`, `is_concatenated`, `is_transposed`), and their gate is asked for numbers, not known by a name. `experts_forward`
has the call of transformers' experts interface, with the adapters beside.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.kernels.experts import ACTIVATIONS, ExpertLoRA, Gate, expert_mlp
from engine.kernels.experts.reference import gated


def gate_of(module: Any) -> Gate | None:
    """How the module makes of gate and up what goes down, found by trying; None where it is none of ours."""
    interleaved = not getattr(module, "is_concatenated", True)
    limit, alpha = (float(getattr(module, name, default)) for name, default in (("limit", 7.0), ("alpha", 1.702)))
    # A model may be asked while it is loaded, where other formats and devices are the default.
    plain: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
    tried = torch.linspace(-12, 12, 64, **plain).outer(torch.linspace(-1, 1, 8, **plain)).roll(3, 0)
    with torch.device("cpu"), torch.no_grad():
        theirs = module._apply_gate(tried)
    for activation in ACTIVATIONS:
        gate = Gate(activation, interleaved, limit, alpha)
        ours = gated(tried, gate)
        if ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5):
            return gate
    return None


def unserved(module: Any) -> str | None:
    """Why `expert_mlp` cannot stand for this module, in words, or None."""
    if not getattr(module, "has_gate", False):
        return "its experts have no gate"
    if getattr(module, "has_post_expert_norm", False):
        return "a norm follows each expert"
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(module, name, None)
        if not isinstance(weight, Tensor) or weight.dim() != 3:
            return f"{name} is not one tensor of all experts"
        if not weight.is_floating_point() or weight.element_size() == 1:
            return f"{name} is packed in {str(weight.dtype).removeprefix('torch.')}"
    if gate_of(module) is None:
        return f"its activation is none of {', '.join(ACTIVATIONS)}"
    return None


def experts_forward(
    module: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    gate: Gate,
    gate_up_lora: ExpertLoRA | None = None,
    down_lora: ExpertLoRA | None = None,
) -> Tensor:
    """The module's result [T, H] for tokens [T, H] and its router's choice [T, k]; `gate` is `gate_of(module)`.

    Ids of `num_experts` and above, and -1, take part in nothing, as under expert parallelism. Packed experts of a module with
    `tile_tokens` take more tokens than these in tiles.
    """
    gate_up, down = module.gate_up_proj, module.down_proj
    if module.is_transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    biases = (module.gate_up_proj_bias, module.down_proj_bias) if module.has_bias else (None, None)
    return expert_mlp(
        hidden_states, top_k_index, top_k_weights, gate_up, down, gate_up_bias=biases[0], down_bias=biases[1],
        gate_up_lora=gate_up_lora, down_lora=down_lora, gate=gate, tile_tokens=getattr(module, "tile_tokens", None),
    )  # fmt: skip
