"""Tiny models of each family that the kernels are named for, a task they can learn, and the curve of a short training."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import transformers
from trl.trainer.utils import add_fused_lm_head

from engine.patches import attention, head

SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 61, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {"final_logit_softcapping": 5.0, "layer_types": ["full_attention"] * 2}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {"layer_types": ["sliding_attention", "full_attention"]}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", EXPERTS),
    "qwen3_5": (
        "Qwen3_5ForCausalLM", "Qwen3_5TextConfig",
        {
            "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2,
            "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        },
    ),
}  # fmt: skip
"""Class, config and what differs from the common shape."""
FUSED = ("gemma3", "qwen3", "qwen3_moe", "qwen3_5")
"""Those whose norm and rotation the fused kernel serves."""


def made(family: str, **changes: Any) -> Any:
    """A model with random weights, the same each time, and norms that are not all one."""
    kind, told, differs = FAMILIES[family]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, told)(**{**SHAPE, **differs, **changes}))
    for name, weight in model.named_parameters():
        if "q_norm" in name or "k_norm" in name:
            torch.nn.init.normal_(weight, mean=float(weight.detach().mean()), std=0.1)
    return model.train()


def with_kernels(model: Any, family: str) -> Any:
    """The model with TRL's head, our op in it, and fused attention where there is one; returns the model."""
    add_fused_lm_head(model)
    on = SimpleNamespace(kernels=SimpleNamespace(use_cut_ce=True))
    assert head.cut_cross_entropy(on, SimpleNamespace(model=model)).count == 1
    if family in FUSED:
        layers = list(attention.attention_layers(SimpleNamespace(model=model)))
        assert layers
        attention.fuse(layers)
    return model


def batches(steps: int, rows: int, length: int, device: str = "cpu") -> list[torch.Tensor]:
    """Rows in which each token follows from the one before by the same rule, which a model can learn."""
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(1, 61, (steps, rows), generator=generator)]
    for _ in range(length - 1):
        ids.append((7 * ids[-1] + 3) % 61)
    return list(torch.stack(ids, -1).to(device))


def curve(
    family: str, kernels: bool, steps: int = 200, rows: int = 4, length: int = 12, device: str = "cpu", **changes: Any
) -> list[float]:
    """Losses of a training in float32 (weights in bfloat16 where `changes` says so)."""
    dtype = changes.pop("dtype", torch.float32)
    model = made(family, **changes).to(device, dtype)
    if kernels:
        with_kernels(model, family)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for ids in batches(steps, rows, length, device):
        more = {"fused_lm_head": True} if kernels else {}
        loss = model(input_ids=ids, labels=ids, **more).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
