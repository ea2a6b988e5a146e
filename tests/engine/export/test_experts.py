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


@pytest.mark.parametrize("family", FAMILIES)
def test_each_expert_has_its_own_adapter(make_run: Make, tmp_path: Path, family: str) -> None:
    """Read here by the names of the base's files alone: W + alpha / r * B A gives the weights that PEFT merges."""
    stabilised = family in ("olmoe", "gpt_oss")
    run = make_run(family, adapter=on_experts(family, use_rslora=stabilised), **FAMILIES[family])
    part = exported(run, tmp_path / "out", "adapter", per_expert=True)
    assert part["parity"]["reader"] == "plain torch, expert by expert"
    assert part["parity"]["logits_error"] < 1e-5
    settings = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert not settings["target_parameters"]
    assert not settings["use_rslora"]
    adapter = load_file(tmp_path / "out/adapter_model.safetensors")
    by_peft_ = by_peft(tmp_path / "base", run.checkpoints / "checkpoint-3")
    weights = load_file(tmp_path / "base/model.safetensors")
    card = (tmp_path / "out/README.md").read_text()
    assert "one for each expert" in card
    if family == "gpt_oss":  # gate, up, gate, up, each expert's [in, out]
        assert "the base's files hold the experts as one weight" in card
        weights = {name: value for name, value in apart(weights).items()}
        by_peft_ = apart(by_peft_)
    else:
        assert "such as vLLM" in card
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
        model.load_state_dict(by_peft_)
        model.save_pretrained(tmp_path / "merged")
        by_peft_ = load_file(tmp_path / "merged/model.safetensors")
    stems = {key.removeprefix("base_model.model.").rpartition(".lora_")[0] for key in adapter}
    assert len([stem for stem in stems if ".experts." in stem]) == 4 * 3 * (1 if family == "deepseek_v3" else 2)
    for stem in stems:
        a, b = (adapter[f"base_model.model.{stem}.lora_{each}.weight"] for each in "AB")
        assert a.shape[0] == b.shape[1] == 4
        ours = weights[f"{stem}.weight"] + settings["lora_alpha"] / settings["r"] * b @ a
        torch.testing.assert_close(ours, by_peft_[f"{stem}.weight"], rtol=1e-5, atol=1e-6, msg=stem)


def apart(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """gpt-oss's experts one by one."""
    found = dict(weights)
    for name, value in weights.items():
        owner, _, leaf = name.rpartition(".")
        for expert in range(4):
            if leaf == "gate_up_proj":
                found[f"{owner}.{expert}.gate_proj.weight"] = value[expert].T[0::2]
                found[f"{owner}.{expert}.up_proj.weight"] = value[expert].T[1::2]
            elif leaf == "down_proj":
                found[f"{owner}.{expert}.down_proj.weight"] = value[expert].T
    return found
