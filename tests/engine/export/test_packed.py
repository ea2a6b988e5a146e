"""Adapters that were trained on bases packed by others leave the house: merged into what the packed numbers stand for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.export.parity import in_layers
from engine.rules import read
from engine.run.store import RunFolder
from tests.engine.export.test_experts import FAMILIES, exported, on_experts
from tests.engine.models.stored_packed.packed_files import packed_folders

Make = Callable[..., RunFolder]


def packed_base(run: RunFolder, where: Path, kind: str, **told: int) -> dict[str, torch.Tensor]:
    """Packs the base of a run where it lies; what its weights stand for then."""
    packed, twin = packed_folders(where / "base", where, kind, **told)
    shutil.rmtree(where / "base")
    packed.rename(where / "base")
    run.config.write_text(run.config.read_text().replace("dtype: float32", "dtype: bfloat16"))
    return load_file(twin / "model.safetensors")


@pytest.mark.parametrize("kind", ["gptq", "awq", "packed", "eights", "floats", "modelopt"])
def test_a_packed_base_leaves_the_house_in_bfloat16_as_training_saw_it(
    make_run: Make, tmp_path: Path, kind: str
) -> None:
    run = make_run("llama", adapter={"target_modules": ["o_proj", "down_proj"]}, dtype=torch.bfloat16)
    told = {} if kind == "eights" else {"group": 16 if kind in ("floats", "modelopt") else 32}
    wide = packed_base(run, tmp_path, kind, **told)
    merged = exported(run, tmp_path / "out")["parity"]
    assert merged["logits_error"] < merged["bound"]
    assert merged["trained_effect"] > 0.01
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    held = load_file(tmp_path / "out/model.safetensors")
    assert held.keys() == wide.keys()
    assert {value.dtype for value in held.values()} == {torch.bfloat16}
    adapter = load_file(run.checkpoints / "checkpoint-3/adapter_model.safetensors")
    settings = json.loads((run.checkpoints / "checkpoint-3/adapter_config.json").read_text())
    for name, value in wide.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" not in adapter:
            # What NVFP4 stands for is a product of three numbers, rounded in another order than here.
            torch.testing.assert_close(
                held[name], value.bfloat16(), rtol=2**-7 if kind in ("floats", "modelopt") else 0, atol=0
            )
            continue
        scale = settings["lora_alpha"] / settings["r"]
        a, b = (adapter[f"{stem}.lora_{part}.weight"].float() for part in "AB")
        asked = value.bfloat16().float() + scale * (b @ a)
        # Nothing but the one rounding of the sum.
        assert (held[name].float() - asked).abs().max() <= asked.abs().max() * 2**-8, name


def test_biases_of_zeros_that_older_tools_add_beside_true_ones_stay_behind(make_run: Make, tmp_path: Path) -> None:
    """Qwen2's files of GPTQ: true biases of attention's inputs, and zeros beside each other layer."""
    run = make_run("qwen2", adapter={"target_modules": ["o_proj", "q_proj"]}, dtype=torch.bfloat16)
    wide = packed_base(run, tmp_path, "gptq", group=32)
    held = load_file(tmp_path / "base/model.safetensors")
    for key in [key for key in held if key.endswith(".qweight")]:
        bias = key.replace("qweight", "bias")
        held[bias] = torch.full_like(held[bias], 0.25) if bias in held else torch.zeros(held[key].shape[1])
    save_file(held, tmp_path / "base/model.safetensors", {"format": "pt"})
    assert exported(run, tmp_path / "out")["parity"]["logits_error"] < 0.05
    merged = load_file(tmp_path / "out/model.safetensors")
    assert merged.keys() == wide.keys()
    assert {value.unique().item() for key, value in merged.items() if key.endswith(".bias")} == {0.25}


def test_scales_of_activations_and_of_the_cache_stay_behind(make_run: Make, tmp_path: Path) -> None:
    run = make_run("llama", adapter={"target_modules": ["o_proj"]}, dtype=torch.bfloat16)
    wide = packed_base(run, tmp_path, "floats", group=16)
    held = load_file(tmp_path / "base/model.safetensors")
    held |= {
        key.replace("weight_packed", "input_global_scale"): torch.tensor([90.0])
        for key in held
        if "weight_packed" in key
    }
    held |= {f"model.layers.{layer}.self_attn.k_scale": torch.tensor([0.5]) for layer in range(2)}
    save_file(held, tmp_path / "base/model.safetensors", {"format": "pt"})
    assert exported(run, tmp_path / "out")["parity"]["logits_error"] < 0.05
    assert load_file(tmp_path / "out/model.safetensors").keys() == wide.keys()


@pytest.mark.parametrize(("family", "kind"), [("qwen3_moe", "gptq"), ("mixtral", "packed")])
def test_packed_experts_leave_it_too(make_run: Make, tmp_path: Path, family: str, kind: str) -> None:
    shape = {**FAMILIES[family], "dtype": torch.bfloat16}
    run = make_run(family, adapter=on_experts(family, target_modules=["o_proj"]), **shape)
    wide = packed_base(run, tmp_path, kind, group=8)
    merged = exported(run, tmp_path / "out")["parity"]
    assert merged["logits_error"] < 1e-3
    assert merged["trained_effect"] > 0.01
    held = load_file(tmp_path / "out/model.safetensors")
    assert held.keys() == wide.keys()
    untouched = [name for name in wide if "q_proj" in name]
    assert untouched
    assert all(torch.equal(held[name], wide[name].bfloat16()) for name in untouched)
    assert all(not torch.equal(held[name], wide[name].bfloat16()) for name in wide if ".experts." in name)
    assert exported(run, tmp_path / "cut", "adapter", per_expert=True)["parity"]["logits_error"] < 1e-3


@pytest.mark.parametrize("method", ["reward", "prm"])
def test_a_judge_on_a_packed_base_is_not_computed_without_its_weights(
    make_run: Make, tmp_path: Path, method: str
) -> None:
    """Its head alone comes with the adapter; layers whose numbers are packed are opened whole."""
    run = make_run("llama", adapter={"target_modules": ["o_proj"]}, dtype=torch.bfloat16)
    base = tmp_path / "base"
    settings = {"model": {"name": str(base)}, "method": {"kind": method}, "adapter": {"kind": "lora"}}
    config = read(settings).config
    assert in_layers(config, base, adapted=True) is not None
    packed_base(run, tmp_path, "gptq")
    assert in_layers(config, base, adapted=True) is None
