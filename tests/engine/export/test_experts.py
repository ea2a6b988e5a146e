"""Adapters on experts that are one weight leave the house: merged into every stored form, and as one adapter an expert."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.errors import WorkbenchError
from engine.export.__main__ import _config
from engine.export.folder import Model
from engine.export.making import make
from engine.export.places import source
from engine.run.store import RunFolder

Make = Callable[..., RunFolder]
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
FEW = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**FEW, "head_dim": 16},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "rope_parameters": PLAIN},
    "deepseek_v3": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 4,
    },
    "qwen3_5_moe": {
        **FEW, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
        "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "shared_expert_intermediate_size": 16,
    },
}  # fmt: skip
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def on_experts(family: str, **more: Any) -> dict[str, Any]:
    attention = "kv_b_proj" if family == "deepseek_v3" else "o_proj"
    return {"target_modules": [attention], "target_parameters": EXPERTS, "lora_alpha": 6, **more}


def exported(run: RunFolder, into: Path, form: str = "safetensors", **asked: Any) -> dict[str, Any]:
    return make(Model(source(run), _config(run)), form, into, asked, lambda *_: None)


def by_peft(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return PeftModel.from_pretrained(model, str(adapter)).merge_and_unload().state_dict()


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_experts_are_those_that_peft_merges(make_run: Make, tmp_path: Path, family: str) -> None:
    stabilised = family in ("olmoe", "gpt_oss")
    run = make_run(family, adapter=on_experts(family, use_rslora=stabilised), sharded="40KB", **FAMILIES[family])
    part = exported(run, tmp_path / "out")
    assert part["parity"]["logits_error"] < 1e-5
    assert part["parity"]["trained_effect"] > 0.01
    base, out = tmp_path / "base", tmp_path / "out"
    assert json.loads((out / "model.safetensors.index.json").read_text())["weight_map"] == (
        json.loads((base / "model.safetensors.index.json").read_text())["weight_map"]
    ), "the base's own layout is kept"
    ours = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).state_dict()
    before = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).state_dict()
    theirs = by_peft(base, run.checkpoints / "checkpoint-3")
    assert ours.keys() == theirs.keys()
    moved = 0
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-6, atol=1e-6, msg=name)
        moved += "experts." in name and not torch.equal(before[name], ours[name])
    assert moved == 2 * (1 if family == "deepseek_v3" else 2)
