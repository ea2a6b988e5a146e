"""Experts that others packed one by one stay packed together, train as their dequantized twins do and go on bit for bit."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.builtin import tiny
from engine.errors import ModelError
from engine.facts.model_shape import model_facts
from engine.features.built import Built
from engine.features.load import load, load_model
from engine.features.packed_experts.apply import prepare
from engine.models.adapters import add_adapter
from engine.models.packed_experts import packed_experts
from tests.engine.features.families import made as made_family
from tests.engine.models.stored_packed.packed_files import PACKERS, packed_folders
from tests.engine.models.test_stored_fp8 import config, gradients
from tests.engine.trainers.conftest import CONVERSATIONS, lines, resumed_from, source, train  # noqa: F401

MIXTURES = {
    "gptq": ("qwen3_moe", {"group": 16, "ordered": True}),
    "awq": ("qwen3_moe", {"group": 16}),
    "packed": ("mixtral", {"group": 16, "symmetric": False}),
    "floats": ("qwen3_moe", {"group": 16}),
}


def mixture(where, kind):
    torch.manual_seed(0)
    family, told = MIXTURES[kind]
    made_family(family, vocab_size=256).save_pretrained(where / "plain")
    return packed_folders(where / "plain", where, kind, **told)


@pytest.mark.parametrize("kind", ["gptq", "awq", "packed"])
def test_experts_stay_packed_under_an_adapter(tmp_path, kind):
    packed, twin = mixture(tmp_path, kind)
    found = []
    for folder in (packed, twin):
        torch.manual_seed(1)
        made = config(
            folder, target_parameters=["experts.gate_up_proj", "experts.down_proj"], target_modules=["o_proj"]
        )
        loaded = load(made)
        model = add_adapter(loaded.model, made)
        if folder == packed:
            held = dict(packed_experts(model))
            told = prepare(made, Built(model))
        found.append((loaded, *gradients(model)))
    (ours, loss, grads), (theirs, twin_loss, twin_grads) = found
    layers, wide = len(held) // 2, dict(theirs.model.named_parameters())
    assert (told.effective, told.count) == ("uint4", layers * 4)
    assert ours.stored_packed.experts == layers * 2
    for name, weight in held.items():
        assert torch.equal(weight.all_unpacked(), wide[name.removeprefix("base_model.model.")])
        assert weight.held.numbers.numel() == weight.numel() / 2
    assert loss == pytest.approx(twin_loss, rel=1e-6)
    assert grads.keys() == twin_grads.keys()
    assert any("experts" in name for name in grads)
    for name, gradient in twin_grads.items():
        assert (grads[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-8, name


def test_experts_are_widened_once_where_it_is_asked_for(tmp_path):
    packed, twin = mixture(tmp_path, "packed")
    asked = config(packed)
    asked.model.quantize_moe_experts = False
    loaded = load(asked)
    wide = dict(load_model(config(twin)).named_parameters())
    found = {
        name: weight for name, weight in loaded.model.named_parameters() if ".experts." in name and weight.dim() == 3
    }
    assert loaded.stored_packed.widened == len(found) == 4
    assert all(torch.equal(weight, wide[name]) for name, weight in found.items())


def test_experts_whose_parts_have_other_scales_stay_wide_or_are_refused(tmp_path):
    packed, _ = mixture(tmp_path, "floats")
    with pytest.raises(
        ModelError, match="cannot stay packed: the parts of an expert are held in other bits, groups or scales"
    ):
        load(config(packed))
    tensors = load_file(packed / "model.safetensors")
    gone = {key: value for key, value in tensors.items() if ".experts.3.up_proj" not in key}
    save_file(gone, packed / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"hold 3 packed parts of .* for 4 experts"):
        load(config(packed))


@pytest.mark.parametrize("kind", ["gptq", pytest.param("packed", marks=pytest.mark.slow)])
def test_a_packed_mixture_trains_and_goes_on_bit_for_bit(train, source, tmp_path, kind):  # noqa: F811
    trains_and_goes_on_bit_for_bit(train, source, tmp_path, kind)


def trains_and_goes_on_bit_for_bit(train, source, tmp_path, kind, **more):  # noqa: F811
    tokenizer = AutoTokenizer.from_pretrained(tiny.folder())
    torch.manual_seed(0)
    family = made_family("qwen3_moe", vocab_size=len(tokenizer), max_position_embeddings=512)
    family.save_pretrained(tmp_path / "plain")
    tokenizer.save_pretrained(tmp_path / "plain")
    packed, twin = packed_folders(tmp_path / "plain", tmp_path, kind, group=16)
    asked = {
        "model.name": str(packed), "model.dtype": "bfloat16", "adapter.kind": "lora", "adapter.r": 3,
        "adapter.target_modules": ["q_proj"], "optim.learning_rate": 1e-2, "optim.max_steps": 4, "run.save_steps": 2,
        "adapter.target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        "data.train": [{"path": source(CONVERSATIONS)}], **more,
    }  # fmt: skip
    run = train(asked)
    losses = [event["loss"] for event in lines(run, "metrics")]
    assert losses[-1] < losses[0]
    told = {entry["feature"]: entry for entry in lines(run, "receipt")[0]["entries"]}
    assert told["stored weights"]["effective"] == "uint4"
    assert "hold all experts of a layer" in told["stored weights"]["detail"]
    assert (told["packed experts"]["effective"], told["packed experts"]["count"]) == ("uint4", 8)
    copied = resumed_from(run, 2, tmp_path / "copy")
    train(folder=copied)
    ends = [load_file(each.checkpoints / "checkpoint-4/adapter_model.safetensors") for each in (run, copied)]
    apart = {name: float((weight - ends[1][name]).abs().max()) for name, weight in ends[0].items()}
    assert not any(apart.values()), apart
    # Plain PEFT opens it on the same numbers in 16 bits.
    opened = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(twin), run.checkpoints / "checkpoint-4")
    keys = {key.replace(".default", "") for key in opened.state_dict() if "lora_" in key}
    assert keys == set(ends[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", ["gptq", "awq", "packed"])
def test_packed_experts_train_on_the_gpu_and_go_on_bit_for_bit(train, source, tmp_path, kind):  # noqa: F811
    exact = {"run.full_determinism": True}  # a card adds up in any order else
    trains_and_goes_on_bit_for_bit(train, source, tmp_path, kind, **exact)


def test_a_packed_router_is_widened_and_trains_as_its_twin(tmp_path):
    packed, twin = mixture(tmp_path, "floats")
    name = "model.layers.0.mlp.gate"
    tensors, wide = load_file(packed / "model.safetensors"), load_file(twin / "model.safetensors")
    parts, wide[f"{name}.weight"] = PACKERS["floats"](wide[f"{name}.weight"].float(), group=16)
    del tensors[f"{name}.weight"]
    save_file(
        tensors | {f"{name}.{end}": each for end, each in parts.items()}, packed / "model.safetensors", {"format": "pt"}
    )
    save_file(wide, twin / "model.safetensors", {"format": "pt"})
    asked = config(packed)
    asked.model.quantize_moe_experts = False
    loaded = load(asked)
    ours, theirs = loaded.model, load_model(config(twin))
    assert loaded.stored_packed.widened == 1 + 4
    # What NVFP4 stands for is a product of three numbers, rounded in another order than the twin's.
    torch.testing.assert_close(
        ours.get_parameter(f"{name}.weight"), theirs.get_parameter(f"{name}.weight"), rtol=1e-6, atol=0
    )
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", ["weight_packed", "fused"])
def test_experts_packed_as_one_weight_are_refused_at_check(tmp_path, shape):
    packed, _ = mixture(tmp_path, "floats")
    tensors = load_file(packed / "model.safetensors")
    stem = "model.layers.0.mlp.experts"
    for name in [name for name in tensors if name.startswith(f"{stem}.")]:
        del tensors[name]
    name = f"{stem}.gate_up_proj.weight_packed" if shape == "weight_packed" else f"{stem}.gate_up_proj"
    tensors[name] = torch.zeros(4, 32, 16, dtype=torch.uint8)
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    flaw = model_facts(str(packed)).flaw
    assert name in flaw
    assert "one by one" in flaw
    with pytest.raises(ModelError, match="all experts of a layer packed as one weight"):
        load(config(packed))
