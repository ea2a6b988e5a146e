"""Bases that others packed are loaded as they lie: under an adapter packed, else wide; what has no place is refused."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from engine.errors import ModelError
from engine.export.stored import read_weight
from engine.facts.model_shape import model_facts
from engine.facts.stored import packed_size, stored_as
from engine.features.load import load, load_model
from tests.engine.models.stored_packed.packed_files import FORMS, note_of, packed_folders
from tests.engine.models.test_stored_fp8 import config
from tests.engine.trainers.conftest import CONVERSATIONS, lines, resumed_from, source, train  # noqa: F401

LINEARS = 4 * 7


@pytest.mark.parametrize("method", ["sft", "reward"])
def test_without_an_adapter_packed_numbers_are_trained_as_plain_ones(plain, tmp_path, method):
    packed, twin = packed_folders(plain, tmp_path, "awq")
    torch.manual_seed(1)
    loaded = load(config(packed, adapter="none", method=method))
    torch.manual_seed(1)
    theirs = load_model(config(twin, adapter="none", method=method))
    assert not loaded.stored_packed.kept
    assert loaded.stored_packed.widened == LINEARS
    assert not hasattr(loaded.model.config, "quantization_config")
    for (name, weight), other in zip(loaded.model.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(weight, other), name
        assert weight.requires_grad


def test_layers_left_out_and_layers_of_other_bits_are_read_as_they_lie(plain, tmp_path):
    """`dynamic` of GPTQModel and `ignore` of others name layers; the tensors say the same. A head is widened, since losses
    read its weight; older tools write a bias of zeros beside each layer."""
    packed, twin = packed_folders(plain, tmp_path, "gptq", left=("o_proj",))
    tensors, wide = (load_file(each / "model.safetensors") for each in (packed, twin))
    from tests.engine.models.stored_packed.packed_files import gptq

    name = "model.layers.1.mlp.down_proj"
    other, wide[f"{name}.weight"] = gptq(torch.randn(64, 128), bits=8, group=64)
    tensors |= {f"{name}.{end}": value for end, value in other.items()}
    tensors["model.layers.0.mlp.up_proj.bias"] = torch.zeros(128)
    head, wide["lm_head.weight"] = gptq(wide["model.embed_tokens.weight"].float() * 2, group=64)
    tensors |= {f"lm_head.{end}": value for end, value in head.items()}
    for folder, each in ((packed, tensors), (twin, wide)):
        save_file(
            {key: value.contiguous() for key, value in each.items()}, folder / "model.safetensors", {"format": "pt"}
        )
        told = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**told, "tie_word_embeddings": False}))
    loaded = load(config(packed))
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, load_model(config(twin))(ids).logits)
    assert type(loaded.model.lm_head) is torch.nn.Linear
    assert (loaded.stored_packed.layers, loaded.stored_packed.widened) == (4 * 6, 1)
    assert loaded.model.model.layers[1].mlp.down_proj.form.kind == "uint8"


def test_one_bias_of_zeros_hides_no_other_entry_that_the_model_has_no_place_for(plain, tmp_path, monkeypatch):
    packed, _ = packed_folders(plain, tmp_path, "gptq")
    tensors = load_file(packed / "model.safetensors")
    tensors |= {"model.layers.0.mlp.up_proj.bias": torch.zeros(128), "model.layers.0.side.bias": torch.ones(4)}
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    unexpected = []
    adjust = PreTrainedModel._adjust_missing_and_unexpected_keys

    def adjusted(self, info):
        adjust(self, info)
        unexpected.extend(info.unexpected_keys)

    monkeypatch.setattr(PreTrainedModel, "_adjust_missing_and_unexpected_keys", adjusted)
    model = load(config(packed)).model
    assert unexpected == ["model.layers.0.side.bias"]
    assert model._keys_to_ignore_on_load_unexpected == type(model)(model.config)._keys_to_ignore_on_load_unexpected


def test_packed_numbers_without_a_place_are_refused(plain, tmp_path):
    packed, _ = packed_folders(plain, tmp_path, "awq")
    tensors = load_file(packed / "model.safetensors")
    other = {
        key.replace("up_proj", "side_proj"): value.clone() for key, value in tensors.items() if "0.mlp.up_proj" in key
    }
    save_file(tensors | other, packed / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"no place for the packed model.layers.0.mlp.side_proj"):
        load(config(packed))


@pytest.mark.parametrize(
    ("note", "stored"),
    [
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "gptq (marlin)"),
        ({"quant_method": "gptq", "is_marlin_format": True}, "gptq (marlin)"),
        ({"quant_method": "gptq", "bits": 5}, "gptq (5 bits)"),
        ({"quant_method": "gptq", "pack_dtype": "int16"}, "gptq (packed in int16)"),
        ({"quant_method": "awq", "version": "GEMV"}, "awq (gemv)"),
        ({"quant_method": "awq", "backend": "llm-awq"}, "awq (llm-awq)"),
        ({"quant_method": "awq", "zero_point": False}, "awq (without zero points)"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "compressed-tensors (marlin-24)"),
        (
            {**note_of("packed"), "sparsity_config": {"format": "sparse-24-bitmask"}},
            "compressed-tensors (sparse-24-bitmask)",
        ),
        ({**note_of("packed"), "transform_config": {"config_groups": {}, "x": 1}}, "compressed-tensors (transforms)"),
        ({"quant_method": "aqlm"}, "aqlm"),
        ({"quant_method": "quip"}, "quip"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "modelopt (nvfp4_awq)"),
    ],
    ids=str,
)
def test_other_forms_are_named(plain, tmp_path, note, stored):
    assert stored_as(note) == stored
    assert packed_size(note) == 0
    packed, _ = packed_folders(plain, tmp_path, "gptq")
    told = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**told, "quantization_config": note}))
    with pytest.raises(ModelError, match=f"got one in {stored.replace('(', '.').replace(')', '.')}"):
        load(config(packed))


def test_packed_numbers_without_a_note_are_refused_by_what_is_missing(plain, tmp_path):
    packed, _ = packed_folders(plain, tmp_path, "gptq")
    told = json.loads((packed / "config.json").read_text())
    del told["quantization_config"]
    (packed / "config.json").write_text(json.dumps(told))
    sentence = r"qweight is packed, and config\.json says nothing of quantization"
    assert "quantize_config.json (GPTQ)" in model_facts(str(packed)).flaw
    with pytest.raises(ModelError, match=sentence):
        load(config(packed))


OWN_FILES = {
    "gptq": ("quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False, "sym": False}),
    "awq": ("quant_config.json", {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}),
    "modelopt": (
        "hf_quant_config.json",
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}},
    ),
}


@pytest.mark.parametrize("kind", OWN_FILES)
def test_notes_in_files_of_their_own_are_read(plain, tmp_path, kind):
    """As AutoGPTQ, AutoAWQ and Model Optimizer wrote them before config.json had them."""
    packed, twin = packed_folders(plain, tmp_path, kind)
    told = json.loads((packed / "config.json").read_text())
    size = packed_size(told.pop("quantization_config"))
    (packed / "config.json").write_text(json.dumps(told))
    name, note = OWN_FILES[kind]
    (packed / name).write_text(json.dumps(note))
    known = model_facts(str(packed))
    assert (known.stored, known.flaw) == (kind, "")
    assert known.stored_size == pytest.approx(size, rel=0.1)
    loaded = load(config(packed))
    assert loaded.stored_packed.layers == LINEARS
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(ids).logits, load_model(config(twin))(ids).logits, rtol=1e-5, atol=1e-5)
    assert read_weight(packed, "model.layers.1.mlp.up_proj.weight").shape == (128, 64)
    # Beside plain weights such a file says nothing.
    shutil.copy(packed / name, twin / name)
    assert model_facts(str(twin)).stored == ""
    # Nor does one that is none.
    (packed / name).write_text("[1, ")
    assert "says nothing of" in model_facts(str(packed)).flaw


def test_scales_after_an_activation_are_refused(plain, tmp_path):
    """AutoAWQ divides after the activations of some families; transformers leaves out what it has no place for."""
    packed, _ = packed_folders(plain, tmp_path, "awq")
    tensors = load_file(packed / "model.safetensors")
    tensors["model.layers.0.mlp.act_fn.scales"] = torch.ones(128)
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    assert "by which AWQ divides" in model_facts(str(packed)).flaw
    with pytest.raises(ModelError, match=r"act_fn\.scales is no scale of a packed weight"):
        load(config(packed))


@pytest.mark.parametrize("form", ["gptq-2", "gptq-3", "packed-3", "gptq-8"])
def test_an_estimate_counts_bits_as_they_are_held(plain, tmp_path, form):
    kind, told = FORMS[form]
    packed, _ = packed_folders(plain, tmp_path, kind, **told)
    tensors = load_file(packed / "model.safetensors")
    tensors["vision_tower.encoder.layers.0.mlp.fc1.weight"] = torch.zeros(4096, 64)  # no layer of the language model
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    held = load(config(packed)).stored_packed.packed_bytes
    assert model_facts(str(packed)).stored_size * 4 * (4 * 64 * 64 + 3 * 64 * 128) == pytest.approx(held, rel=0.12)


def test_config_json_alone_tells_the_bytes(plain, tmp_path):
    assert packed_size(note_of("gptq", group=128, symmetric=True)) == 0.5 + 2 / 128
    assert packed_size(note_of("awq", group=128)) == 0.5 + 3 / 128
    assert packed_size(note_of("packed", bits=8, group=-1)) == 1
    assert packed_size(note_of("floats", group=16)) == 0.5 + 1 / 16
    packed, _ = packed_folders(plain, tmp_path, "packed")
    known = model_facts(str(packed))
    layers = load(config(packed)).stored_packed
    numbers = 4 * (4 * 64 * 64 + 3 * 64 * 128)
    assert known.stored == "compressed-tensors"
    # Beside what is held, headers count norms and shapes.
    assert known.stored_size * numbers == pytest.approx(layers.packed_bytes, rel=0.05)
