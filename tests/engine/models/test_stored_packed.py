"""Bases that GPTQ, AWQ and compressed-tensors packed train adapters as their dequantized twins do, bit for bit, and stay packed."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.builtin import tiny
from engine.errors import ModelError
from engine.export.stored import read_weight
from engine.facts.model_shape import model_facts
from engine.facts.stored import packed_size, stored_as
from engine.features.built import Built, decoder_layers
from engine.features.compile.apply import checkpoint_inside
from engine.features.load import load, load_model
from engine.features.packed_experts.apply import prepare
from engine.models.adapters import add_adapter
from engine.models.packed_experts import packed_experts
from engine.models.sizes import format_of, weights_in
from engine.models.stored_packed import PackedLinear
from tests.engine.features.families import made as made_family
from tests.engine.models.packed_files import note_of, packed_folders
from tests.engine.models.test_stored_fp8 import config, gradients
from tests.engine.trainers.conftest import CONVERSATIONS, lines, resumed_from, source, train  # noqa: F401

LINEARS = 4 * 7
FORMS = {
    "gptq": ("gptq", {}),
    "gptq-v2": ("gptq", {"form": "gptq_v2"}),
    "gptq-ordered": ("gptq", {"ordered": True}),
    "gptq-symmetric": ("gptq", {"symmetric": True, "group": -1}),
    "gptq-8": ("gptq", {"bits": 8}),
    "gptq-3": ("gptq", {"bits": 3}),
    "gptq-2": ("gptq", {"bits": 2, "symmetric": True}),
    "awq": ("awq", {}),
    "packed": ("packed", {}),
    "packed-channel-8": ("packed", {"bits": 8, "group": -1}),
    "packed-uneven": ("packed", {"symmetric": False}),
    "packed-ordered": ("packed", {"ordered": True}),
    "packed-3": ("packed", {"bits": 3, "symmetric": False}),
    "packed-3-whole": ("packed", {"bits": 3, "symmetric": False, "whole": True}),
    "packed-7-whole": ("packed", {"bits": 7, "group": -1, "whole": True}),
    "eights": ("eights", {}),
    "mxfp4": ("floats", {"group": 32}),
    "nvfp4": ("floats", {"group": 16}),
    "modelopt": ("modelopt", {}),
}


@pytest.fixture(scope="module")
def plain():
    return tiny.folder()


@pytest.mark.parametrize("form", FORMS)
def test_adapters_on_packed_numbers_have_the_gradients_of_the_dequantized_model(plain, tmp_path, form):
    kind, told = FORMS[form]
    packed, twin = packed_folders(plain, tmp_path, kind, **told)
    found = []
    for folder in (packed, twin):
        torch.manual_seed(1)
        made = config(folder)
        loaded = load(made)
        weights = {path: each for path, each in loaded.model.named_modules() if isinstance(each, torch.nn.Linear)}
        found.append((loaded, weights, *gradients(add_adapter(loaded.model, made))))
    (ours, packs, loss, grads), (_, plains, twin_loss, twin_grads) = found
    exact = form not in ("nvfp4", "modelopt")  # their scale is a product of two here and a quotient there
    assert ours.stored_packed.layers == sum(isinstance(each, PackedLinear) for each in packs.values()) == LINEARS
    for path, each in packs.items():
        if isinstance(each, PackedLinear):
            torch.testing.assert_close(each.wide(torch.float32), plains[path].weight, rtol=0 if exact else 1e-6, atol=0)
    assert loss == twin_loss if exact else loss == pytest.approx(twin_loss, rel=1e-5)
    assert grads.keys() == twin_grads.keys()
    assert len(grads) == 2 * LINEARS
    for name, grad in grads.items():
        torch.testing.assert_close(grad, twin_grads[name], rtol=0 if exact else 1e-4, atol=0 if exact else 1e-7)


def test_weights_in_other_formats_stay_as_they_are_when_the_model_is_cast(plain, tmp_path):
    packed, _ = packed_folders(plain, tmp_path, "gptq", ordered=True)
    model = load_model(config(packed))
    layer = model.model.layers[0].mlp.up_proj
    before = layer.wide(torch.float32)
    model.to(torch.bfloat16).half()
    assert (format_of(layer.weight), weights_in(layer.weight)) == ("uint4", 64 * 128)
    assert (layer.weight.dtype, layer.weight_scale.dtype) == (torch.uint8, torch.float16)
    assert torch.equal(layer.wide(torch.float32), before)
    assert layer.packed_bytes < 0.9 * layer.in_features * layer.out_features
    x = torch.randn(3, 64, dtype=torch.bfloat16, requires_grad=True)
    out = layer(x)
    assert max(each.numel() for each in out.grad_fn.saved_tensors if each is not None) <= layer.weight.numel()
    out.sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 128, dtype=torch.bfloat16) @ layer.wide(torch.bfloat16))


@pytest.mark.parametrize("form", ["gptq-ordered", "awq", "nvfp4"])
def test_compiled_layers_give_what_plain_ones_give_and_unpack_again_in_backward(plain, tmp_path, form):
    kind, told = FORMS[form]
    packed, _ = packed_folders(plain, tmp_path, kind, **told)
    layer = load_model(config(packed)).model.layers[1].mlp.down_proj
    kept = []

    def forward(graph, _):
        (out,) = [node for node in graph.graph.nodes if node.op == "output"]
        kept.extend(node.meta["val"].numel() for node in out.args[0] if node is not None and node.op != "placeholder")
        return make_boxed_func(graph.forward)

    def backward(graph, _):
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=forward, bw_compiler=backward, partition_fn=min_cut_rematerialization_partition)
    torch._dynamo.reset()
    found = []
    for each in (layer, torch.compile(layer, backend=backend, fullgraph=True)):
        x = torch.randn(5, 128, generator=torch.Generator().manual_seed(3)).requires_grad_()
        out = each(x.sin()).sin()  # what is kept of other operations goes over the same border
        out.square().sum().backward()
        found.append((out.detach(), x.grad))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    assert kept
    assert max(kept) < layer.in_features * layer.out_features


def test_a_checkpointed_decoder_layer_of_packed_numbers_and_adapters_is_one_graph(plain, tmp_path):
    packed, _ = packed_folders(plain, tmp_path, "gptq", ordered=True)
    made = config(packed)
    torch.manual_seed(1)
    model = add_adapter(load_model(made), made).train()
    _, plain_gradients = gradients(model)
    base = model.get_base_model()
    base.gradient_checkpointing_enable({"use_reentrant": False})
    undo = checkpoint_inside([base])
    torch._dynamo.reset()
    counters.clear()
    for layer in decoder_layers(base):
        layer.compile(backend="aot_eager", fullgraph=True)
    model.zero_grad()
    _, found = gradients(model)
    undo()
    assert counters["stats"]["unique_graphs"] <= 2  # the first layer's input leads to no weight
    assert not counters["graph_break"]
    assert found.keys() == plain_gradients.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, plain_gradients[name], rtol=1e-4, atol=1e-7)


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
    from tests.engine.models.packed_files import gptq

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


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"qweight": torch.zeros(7, 64, dtype=torch.int32)}, "7 words of 32 bits are no 128 numbers"),
        ({"qweight": torch.zeros(16, 63, dtype=torch.int32)}, r"its numbers have the shape \(16, 63\) for 64 x 128"),
        ({"scales": None}, "its scales have the shape None for 64 rows"),
        ({"scales": torch.full((4, 64), float("nan"), dtype=torch.float16)}, "the scales of .* are not finite"),
        (
            {"qzeros": torch.zeros(3, 8, dtype=torch.int32)},
            r"its zero points have the shape \(3, 64\), and \(4, 64\) is wanted",
        ),
        ({"g_idx": torch.full((128,), 4, dtype=torch.int32)}, "its g_idx names groups beyond its 4"),
        ({"g_idx": torch.zeros(3, dtype=torch.int32)}, "its g_idx names groups of 3 columns of 128"),
        ({"bias": torch.ones(64)}, "has a bias in the files, for which the model has no place"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_in_a_sentence(plain, tmp_path, change, sentence):
    packed, _ = packed_folders(plain, tmp_path, "gptq")
    tensors = load_file(packed / "model.safetensors")
    changed = {f"model.layers.2.mlp.down_proj.{end}": value for end, value in change.items()}
    tensors = {key: value for key, value in {**tensors, **changed}.items() if value is not None}
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=sentence):
        load(config(packed))


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


@pytest.mark.parametrize("kind", ["gptq", "packed"])
def test_a_packed_mixture_trains_and_goes_on_bit_for_bit(train, source, tmp_path, kind):  # noqa: F811
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
        "data.train": [{"path": source(CONVERSATIONS)}],
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
    assert all(torch.equal(weight, ends[1][name]) for name, weight in ends[0].items())
    # Plain PEFT opens it on the same numbers in 16 bits.
    opened = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(twin), run.checkpoints / "checkpoint-4")
    keys = {key.replace(".default", "") for key in opened.state_dict() if "lora_" in key}
    assert keys == set(ends[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("form", FORMS)
def test_packed_numbers_on_the_gpu_are_those_of_the_dequantized_model(plain, tmp_path, form):
    kind, told = FORMS[form]
    packed, twin = packed_folders(plain, tmp_path, kind, **told)
    found = []
    for folder in (packed, twin):
        torch.manual_seed(1)
        made = config(folder, "bfloat16")
        found.append((folder, *gradients(add_adapter(load(made).model.cuda(), made))))
    (_, loss, grads), (_, twin_loss, twin_grads) = found
    assert loss == pytest.approx(twin_loss, rel=1e-3)
    for name, grad in grads.items():
        assert (grad - twin_grads[name]).norm() <= 2e-2 * twin_grads[name].norm(), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", ["gptq", "awq", "packed"])
def test_packed_experts_train_on_the_gpu_and_go_on_bit_for_bit(train, source, tmp_path, kind):  # noqa: F811
    test_a_packed_mixture_trains_and_goes_on_bit_for_bit(train, source, tmp_path, kind)
