"""Tiny models of each family that the kernels are named for, a task they can learn, and the curve of a short training."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from trl.trainer.utils import add_fused_lm_head

from engine.features.built import decoder_layers
from engine.features.cut_cross_entropy import apply as cut_cross_entropy
from engine.features.fused_lora import apply as fused_lora
from engine.features.fused_norm_rope import apply as fused_norm_rope
from engine.kernels.experts.packed import Packer
from tests.engine.features.conftest import built_of

SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 61, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
TURNS = {**PLAIN, "mrope_section": [2, 1, 1]}
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
    "qwen3_5_moe": (
        "Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig",
        {
            "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2,
            "linear_key_head_dim": 8, "linear_value_head_dim": 8, "shared_expert_intermediate_size": 16, **EXPERTS,
        },
    ),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", "Qwen3VLConfig", {"rope_parameters": TURNS}),
    "qwen3_vl_moe": (
        "Qwen3VLMoeForConditionalGeneration", "Qwen3VLMoeConfig", {"rope_parameters": TURNS, **EXPERTS}
    ),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {"bos_token_id": 1, "eos_token_id": 2}),
    "granite": ("GraniteForCausalLM", "GraniteConfig", {"logits_scaling": 4.0}),
    "cohere": (
        "CohereForCausalLM", "CohereConfig", {"logit_scale": 0.25, "bos_token_id": 1, "eos_token_id": 2}
    ),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": PLAIN}),
}  # fmt: skip
"""Class, config and what differs from the common shape; of models that see, it is the text model's."""
SEEING = ("qwen3_vl", "qwen3_vl_moe")
VISION = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32,
    "deepstack_visual_indexes": [0],
}  # fmt: skip
FUSED = (
    "gemma3", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "llama", "gemma2",
    "qwen2", "mistral", "mixtral", "granite",
)  # fmt: skip
"""Those whose norm and rotation, or rotation alone, the fused kernels serve."""


def made(family: str, **changes: Any) -> Any:
    """A model with random weights, the same each time, and norms that are not all one."""
    kind, told, differs = FAMILIES[family]
    torch.manual_seed(0)
    shape = {**SHAPE, **differs, **changes}
    given = {"text_config": shape, "vision_config": VISION} if family in SEEING else shape
    model = getattr(transformers, kind)(getattr(transformers, told)(**given))
    for name, weight in model.named_parameters():
        if "q_norm" in name or "k_norm" in name:
            torch.nn.init.normal_(weight, mean=float(weight.detach().mean()), std=0.1)
    return model.train()


def stored_in_mxfp4(folder: Path) -> dict[str, torch.Tensor]:
    """Has a saved gpt-oss hold its experts as it is published: bytes and scales in place of each weight. What they stand for,
    by the weights' names, in float32."""
    wide, tensors = {}, load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        weight = tensors.pop(name)
        packer = Packer(len(weight), "mxfp4", torch.float32, turned=True)
        for expert in weight:
            packer.add(expert)
        found = packer.done()
        scales = found.held.scales.view(len(weight), weight.shape[2], -1)
        tensors |= {f"{name}_blocks": found.held.numbers.view(*scales.shape, 16), f"{name}_scales": scales}
        wide[name] = found.all_unpacked().contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    told = json.loads((folder / "config.json").read_text())
    told["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(told))
    return wide


def with_kernels(model: Any, family: str) -> Any:
    """The model with TRL's head, our op in it, and fused attention where there is one; returns the model."""
    add_fused_lm_head(model)
    on = SimpleNamespace(method=None, kernels=SimpleNamespace(use_cut_ce=True, cut_ce_workspace=None))
    assert cut_cross_entropy.apply(on, built_of(SimpleNamespace(model=model))).count == 1
    if family in FUSED:
        layers = fused_norm_rope.attention_layers(built_of(SimpleNamespace(model=model)))
        assert layers
        fused_norm_rope.fuse(layers)
    return model


def adapted(model: Any, kernels: bool) -> list[torch.nn.Parameter]:
    """Puts LoRA on all linear layers, in closed form with `kernels`; the weights that train."""
    torch.manual_seed(2)
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    if kernels:
        found, _undo = fused_lora.fuse(list(decoder_layers(wrapped)))
        assert found.served > 0
    return [weight for weight in wrapped.parameters() if weight.requires_grad]


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
    """Losses of a training in float32 (weights in bfloat16 where `changes` says so); with `adapters` LoRA alone trains, and
    `flipped` has the same rows of each batch in another order, so that sums round otherwise."""
    dtype, adapters = changes.pop("dtype", torch.float32), changes.pop("adapters", False)
    flipped = changes.pop("flipped", False)
    model = made(family, **changes).to(device, dtype)
    if kernels:
        with_kernels(model, family)
    trained = list(model.parameters())
    if adapters:
        trained = adapted(model, kernels)
    optimizer = torch.optim.AdamW(trained, lr=5e-3 if adapters else 2e-3)
    losses = []
    for ids in batches(steps, rows, length, device):
        ids = ids.flip(0) if flipped else ids
        more = {"fused_lm_head": True} if kernels else {}
        loss = model(input_ids=ids, labels=ids, **more).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
