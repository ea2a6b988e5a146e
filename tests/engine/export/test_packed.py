"""Adapters that were trained on bases packed by others leave the house: merged into what the packed numbers stand for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.export.parity import in_layers
from engine.rules import read
from engine.run.store import RunFolder
from tests.engine.export.test_experts import FAMILIES, exported, on_experts
from tests.engine.models.packed_files import packed_folders

Make = Callable[..., RunFolder]


def packed_base(run: RunFolder, where: Path, kind: str, **told: int) -> dict[str, torch.Tensor]:
    """Packs the base of a run where it lies; what its weights stand for then."""
    packed, twin = packed_folders(where / "base", where, kind, **told)
    shutil.rmtree(where / "base")
    packed.rename(where / "base")
    run.config.write_text(run.config.read_text().replace("dtype: float32", "dtype: bfloat16"))
    return load_file(twin / "model.safetensors")


@pytest.mark.parametrize("kind", ["gptq", "awq", "packed", "floats"])
def test_a_packed_base_leaves_the_house_in_bfloat16_as_training_saw_it(
    make_run: Make, tmp_path: Path, kind: str
) -> None:
    run = make_run("llama", adapter={"target_modules": ["o_proj", "down_proj"]}, dtype=torch.bfloat16)
    wide = packed_base(run, tmp_path, kind, group=16 if kind == "floats" else 32)
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
            torch.testing.assert_close(held[name], value.bfloat16(), rtol=2**-7 if kind == "floats" else 0, atol=0)
            continue
        scale = settings["lora_alpha"] / settings["r"]
        a, b = (adapter[f"{stem}.lora_{part}.weight"].float() for part in "AB")
        asked = value.bfloat16().float() + scale * (b @ a)
        # Nothing but the one rounding of the sum.
        assert (held[name].float() - asked).abs().max() <= asked.abs().max() * 2**-8, name


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
