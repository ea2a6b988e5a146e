"""The weights of an adapter's folder come into the model whole, or one of them is named."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.builtin import tiny
from engine.config.tree import RunConfig
from engine.data.gather_facts import gather_facts
from engine.errors import ModelError
from engine.features import fp8_base
from engine.features.load import load_model
from engine.models.adapter_folder import beginning, load_adapter
from engine.models.adapters import add_adapter
from engine.planning.auto import resolved
from engine.rules import read

CARD = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
WITHOUT_FP8 = pytest.mark.skipif(not CARD, reason="no CUDA device that multiplies in FP8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(5)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny.folder()),
        LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "v_proj"]),
    )
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data.normal_()
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def config_of(folder: Path, **model: object) -> RunConfig:
    mapping = {
        "model": {"name": "builtin/tiny", "dtype": "float32", **model},
        "adapter": {"kind": "lora", "path": str(folder)},
    }
    facts = gather_facts(read(mapping).config, folder)
    return resolved(read(mapping, facts).config, facts)


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"quantization": "nf4"},
        {"dtype": "bfloat16"},
        pytest.param({"quantization": "fp8", "dtype": "bfloat16"}, marks=[pytest.mark.gpu, WITHOUT_FP8]),
    ],
)
def test_every_number_is_the_files_whatever_the_base_is_held_in(
    folder: Path, model: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8_base, "LEAST_NUMBERS", 0)
    config = config_of(folder, **model)
    adapted = add_adapter(load_model(config), config)
    begun = load_adapter(adapted, config, folder)
    stored = load_file(folder / "adapter_model.safetensors")
    held = {name.replace(".default", ""): weight for name, weight in adapted.named_parameters() if weight.requires_grad}
    assert held.keys() == stored.keys()
    assert all(held[name].cpu().equal(stored[name].to(held[name].dtype)) for name in stored)
    assert begun.weights == len(stored) == 16
    assert begun.largest == max(value.abs().max().item() for name, value in stored.items() if "lora_B" in name)
    assert begun.rounded is (model.get("dtype") == "bfloat16")


@pytest.mark.parametrize("what", ["lacking", "more", "shape", "nan", "changed"])
def test_a_file_that_does_not_fit_changes_nothing_and_names_the_weight(folder: Path, what: str) -> None:
    config = config_of(folder)
    path = folder / "adapter_model.safetensors"
    stored = load_file(path)
    name = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"
    said = {
        "lacking": "holds no " + name,
        "more": f"holds {name.replace('v_proj', 'o_proj')}, for which the model has no place",
        "shape": f"{name} is 64 x 5 numbers, and the model has 64 x 4",
        "nan": f"{name} holds numbers that are not finite",
        "changed": "adapter_model.safetensors has changed since it was saved",
    }[what]
    if what == "lacking":
        del stored[name]
    elif what == "more":
        stored[name.replace("v_proj", "o_proj")] = stored[name].clone()
    elif what == "shape":
        stored[name] = torch.zeros(64, 5)
    elif what == "nan":
        stored[name][0, 0] = torch.nan
    else:
        saved = {"size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        (folder / "COMMIT.json").write_text(json.dumps({"files": {path.name: saved}}))
        stored[name][0, 0] += 1
    save_file(stored, path)
    adapted = add_adapter(load_model(config), config)
    with pytest.raises(ModelError) as refused:
        load_adapter(adapted, config, folder)
    assert said in refused.value.message
    assert refused.value.message.startswith("adapter.path: ")
    second = dict(adapted.named_parameters())["base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight"]
    assert not second.any()


def test_a_run_that_goes_on_is_held_to_its_copy_or_to_what_it_began_from(folder: Path) -> None:
    """It was held to nothing before `method.beta` was set, so its checkpoint has no copy."""
    mapping = {"adapter": {"kind": "lora", "path": str(folder)}, "method": {"kind": "dpo", "reference": "adapter_copy"}}
    config, checkpoint = read(mapping).config, folder.parent / "checkpoint-2"
    assert beginning(config, None, "ref") == folder
    assert beginning(config, checkpoint, "ref") == folder
    assert beginning(read({**mapping, "method": {"kind": "sft"}}).config, checkpoint, "ref") is None
    folder.rename((checkpoint.mkdir(), checkpoint / "ref")[1])
    assert beginning(config, checkpoint, "ref") == checkpoint / "ref"
