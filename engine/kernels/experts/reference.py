"""Experts of a mixture with their adapters in plain torch, one expert after the other: the truth for the kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "clamped_swiglu")
"""`clamped_swiglu` is gpt-oss's: gate at most `limit`, up within it, `gate * sigmoid(alpha * gate) * (up + 1)`."""


class ExpertLoRA(NamedTuple):
    """Adapters of every expert's projection: `y + scale * B_e(A_e(x))`, A [E, r, in], B [E, out, r], of any strides."""

    a: Tensor
    b: Tensor
    scale: float = 1.0

    @classmethod
    def from_peft(cls, lora_a: Tensor, lora_b: Tensor, experts: int, scale: float) -> ExpertLoRA:
        """Views of what PEFT's `target_parameters` keep: A [E * r, in] expert by expert, B [out, r * E] rank by rank."""
        a = lora_a.view(experts, -1, lora_a.shape[-1])
        return cls(a, lora_b.view(lora_b.shape[0], -1, experts).permute(2, 0, 1), scale)


class Gate(NamedTuple):
    """How gate and up become what goes down. `interleaved`: columns gate, up, gate, up; else first all of gate."""

    activation: str = "silu"
    interleaved: bool = False
    limit: float = 7.0
    alpha: float = 1.702


SWIGLU = Gate()


def expert_mlp_reference(
    x: Tensor,
    expert_ids: Tensor,
    routing_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate_up_lora: ExpertLoRA | None = None,
    down_lora: ExpertLoRA | None = None,
    gate: Gate = SWIGLU,
) -> Tensor:
    """As `expert_mlp`; waits for the device, since it asks which tokens go where."""
    tokens, top_k = expert_ids.shape
    flat = expert_ids.reshape(-1)
    results, places = [], []
    for expert in range(gate_up.shape[0]):
        slots = (flat == expert).nonzero().squeeze(1)
        if expert and not slots.numel():  # the first one's rows, be there none, tie all factors to the graph
            continue
        both = _projected(x[slots // top_k], expert, gate_up, gate_up_bias, gate_up_lora)
        result = _projected(gated(both, gate), expert, down, down_bias, down_lora)
        results.append(result * routing_weights.reshape(-1)[slots, None].to(result.dtype))
        places.append(slots)
    every = x.new_zeros(tokens * top_k, down.shape[1]).index_copy(0, torch.cat(places), torch.cat(results))
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return every.view(tokens, top_k, down.shape[1]).sum(1, dtype=wide).to(x.dtype)


def expert_mlp_dense(
    x: Tensor, expert_ids: Tensor, routing_weights: Tensor, gate_up: Tensor, down: Tensor, *,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, gate_up_lora: ExpertLoRA | None = None,
    down_lora: ExpertLoRA | None = None, gate: Gate = SWIGLU,
) -> Tensor:  # fmt: skip
    """The same from every expert for every token, most of them weighted by zero: slow, and one graph whatever the ids."""
    total = x.new_zeros(x.shape[0], down.shape[1], dtype=torch.promote_types(x.dtype, torch.float32))
    for expert in range(gate_up.shape[0]):
        both = _projected(x, expert, gate_up, gate_up_bias, gate_up_lora)
        result = _projected(gated(both, gate), expert, down, down_bias, down_lora)
        weight = routing_weights.masked_fill(expert_ids != expert, 0.0).sum(1, keepdim=True)
        total = total + result * weight.to(result.dtype)
    return total.to(x.dtype)


def gated(both: Tensor, gate: Gate) -> Tensor:
    """[..., I] of gate and up [..., 2 I]; computed in float32 and rounded once."""
    wide = both if both.dtype == torch.float64 else both.float()
    opened, up = (wide[..., ::2], wide[..., 1::2]) if gate.interleaved else wide.chunk(2, -1)
    if gate.activation == "clamped_swiglu":
        opened, up = opened.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
        found = opened * torch.sigmoid(gate.alpha * opened) * (up + 1)
    elif gate.activation == "silu":
        found = F.silu(opened) * up
    else:
        found = F.gelu(opened, approximate="tanh" if gate.activation == "gelu_tanh" else "none") * up
    return found.to(both.dtype)


def _projected(rows: Tensor, expert: int, weight: Tensor, bias: Tensor | None, lora: ExpertLoRA | None) -> Tensor:
    out = rows @ weight[expert].T
    if lora is not None:
        a, b = lora.a[expert].to(rows.dtype), lora.b[expert].to(rows.dtype)
        out = out + (rows @ a.T * lora.scale) @ b.T
    return out if bias is None else out + bias[expert].to(rows.dtype)
