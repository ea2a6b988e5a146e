"""A model stored in FP8 trains adapters as its dequantized twin does, ragged blocks and all, and takes half the room."""

from __future__ import annotations

import copy
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    AutoTokenizer,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from engine.builtin import tiny
from engine.config.method import METHODS
from engine.errors import ModelError
from engine.facts.model_shape import model_facts
from engine.facts.stored import block_of, packed_size, stored_as
from engine.features.built import Built, decoder_layers
from engine.features.compile.apply import compile_layers
from engine.features.load import load, load_model
from engine.features.packed_experts.apply import prepare
from engine.models.adapters import add_adapter
from engine.models.packed_experts import packed_experts
from engine.models.stored_fp8 import Fp8Linear, dequantized, load_fp8, stored_fp8
from tests.engine.features.families import made as made_family
from tests.engine.trainers.conftest import CONVERSATIONS, lines, resumed_from, source, train  # noqa: F401

# The last blocks are ragged, and their number divides the sizes, which must not be taken for a block of another size.
BLOCKS = [(48, 48), (40, 128), None]
LINEARS = 4 * 7
DEEPSEEK = {
    "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 256,
    "num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
NUMBERS = 4 * (4 * 64 * 64 + 3 * 64 * 128)


@pytest.fixture(scope="module")
def plain():
    return tiny.folder()


def by_hand(weight, scale, block):
    """Each number times the scale of its block, one at a time."""
    rows, columns = block
    out = torch.empty(weight.shape)
    for row in range(weight.shape[0]):
        for column in range(weight.shape[1]):
            out[row, column] = weight[row, column].float() * scale[row // rows, column // columns]
    return out


def stored(weight, block):
    """The weight in FP8, a scale for each block, and what they mean in float32."""
    rows, columns = block or weight.shape
    high, wide = (-(-size // step) for size, step in zip(weight.shape, (rows, columns), strict=True))
    scale = torch.empty(high, wide)
    out, numbers = torch.empty(weight.shape), torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for row in range(high):
        for column in range(wide):
            part = slice(row * rows, (row + 1) * rows), slice(column * columns, (column + 1) * columns)
            scale[row, column] = weight[part].abs().max() / 448
            numbers[part] = (weight[part] / scale[row, column]).to(torch.float8_e4m3fn)
            out[part] = numbers[part].float() * scale[row, column]
    return numbers, scale if block else scale.reshape(()), out


def folders(plain, where, block):
    """A model (the built-in one) stored in FP8, and the same numbers stored in float32."""
    found = {}
    for name in ("fp8", "twin"):
        shutil.copytree(plain, where / name)
        found[name] = load_file(where / name / "model.safetensors")
    for key, weight in list(found["fp8"].items()):
        if "layers." in key and weight.dim() == 2 and not key.endswith("mlp.gate.weight"):
            scale_key = key.replace(".weight", ".weight_scale_inv")
            found["fp8"][key], found["fp8"][scale_key], found["twin"][key] = stored(weight, block)
    for name, tensors in found.items():
        save_file(tensors, where / name / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((where / "fp8" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": block, "activation_scheme": "dynamic"}
    (where / "fp8" / "config.json").write_text(json.dumps(config))
    return where / "fp8", where / "twin"


def config(folder, dtype="float32", adapter="lora", method="sft", **changes):
    lora = {
        "kind": adapter, "r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": "all-linear",
        "target_parameters": [], "modules_to_save": [], "use_rslora": False, "use_dora": False, "bias": "none",
        "autocast_adapter_dtype": False, "unfrozen_parameters": [], **changes,
    }  # fmt: skip
    model = {"name": str(folder), "tokenizer": None, "dtype": dtype, "attention": "sdpa", "quantization": "none"}
    return SimpleNamespace(
        model=SimpleNamespace(revision=None, train_vision="all", quantize_moe_experts=True, **model),
        adapter=SimpleNamespace(**lora),
        method=METHODS[method].model_construct(),
        distributed=SimpleNamespace(strategy="auto", cpu_offload=False, expert_parallel_size=1),
        memory=SimpleNamespace(layer_offloading=False),
    )


def gradients(model):
    torch.manual_seed(2)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data = 0.1 * torch.randn(weight.shape).to(weight)
    ids = torch.randint(3, 200, (2, 24)).to(model.device)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), {name: w.grad for name, w in model.named_parameters() if w.grad is not None}


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_on_fp8_have_the_gradients_of_the_dequantized_model(plain, tmp_path, block, dtype):
    fp8, twin = folders(plain, tmp_path, block)
    found, held = [], []
    for folder in (fp8, twin):
        torch.manual_seed(1)
        made = config(folder, dtype)
        loaded = load(made)
        held.append(loaded.stored_fp8)
        model = add_adapter(loaded.model, made)
        found.append((model, *gradients(model)))
    (ours, loss, grads), (theirs, twin_loss, twin_grads) = found
    assert loss == twin_loss
    assert grads.keys() == twin_grads.keys()
    assert len(grads) == 2 * LINEARS
    for name, gradient in twin_grads.items():
        assert gradient.dtype == grads[name].dtype == getattr(torch, dtype)
        assert (grads[name].double() - gradient.double()).norm() <= 1e-6 * gradient.double().norm(), name
    layers = [module for module in ours.modules() if isinstance(module, Fp8Linear)]
    assert len(layers) == LINEARS
    for module, other in zip(layers, (m.base_layer for m in theirs.modules() if hasattr(m, "base_layer")), strict=True):
        assert module.weight.element_size() == 1
        assert module.weight.numel() == other.weight.numel()
    assert held[0].kept
    assert held[1] is None


def test_a_model_stored_in_fp8_is_trained_whole_as_plain_numbers(plain, tmp_path):
    fp8, twin = folders(plain, tmp_path, (48, 48))
    for method in ("sft", "reward"):
        torch.manual_seed(1)
        loaded = load(config(fp8, adapter="none", method=method))
        ours = loaded.model
        torch.manual_seed(1)
        theirs = load_model(config(twin, adapter="none", method=method))
        assert not loaded.stored_fp8.kept
        assert not hasattr(ours.config, "quantization_config")
        for (name, weight), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert torch.equal(weight, other), name


def mixtures(where, family, block, **changes):
    """The folders of a mixture of this family."""
    if family == "deepseek_v3":
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**DEEPSEEK))
        torch.nn.init.normal_(model.model.layers[1].mlp.gate.weight, std=0.5)
    else:
        model = made_family(family, vocab_size=256, **changes)
    model.save_pretrained(where / "plain")
    return folders(where / "plain", where, block)


@pytest.mark.parametrize(
    ("family", "block"),
    # Blocks that end where gate and up meet, that do not, and one scale a matrix.
    [("qwen3_moe", (8, 16)), ("qwen3_moe", (24, 24)), ("qwen3_moe", None), ("deepseek_v3", (16, 48))],
)
def test_experts_stored_in_fp8_stay_so_under_an_adapter(tmp_path, family, block):
    torch.manual_seed(0)
    fp8, twin = mixtures(tmp_path, family, block)
    found = []
    for folder in (fp8, twin):
        torch.manual_seed(1)
        made = config(
            folder, target_parameters=["experts.gate_up_proj", "experts.down_proj"], target_modules=["o_proj"]
        )
        loaded = load(made)
        model = add_adapter(loaded.model, made)
        if folder == fp8:
            held = dict(packed_experts(model))
            told = prepare(made, Built(model))
        found.append((loaded, *gradients(model)))
    (ours, loss, grads), (theirs, twin_loss, twin_grads) = found
    layers, wide = len(held) // 2, dict(theirs.model.named_parameters())
    assert told.effective == "fp8"
    assert told.count == layers * 4
    assert (ours.stored_fp8.fused, ours.stored_fp8.packed) == (layers * 4 * 3, True)
    for name, weight in held.items():
        assert torch.equal(weight.all_unpacked(), wide[name.removeprefix("base_model.model.")])
        assert weight.held.numbers.numel() == weight.numel()
        assert weight.form.finite
    assert loss == pytest.approx(twin_loss, rel=1e-6)
    assert grads.keys() == twin_grads.keys()
    assert any("experts" in name for name in grads)
    for name, gradient in twin_grads.items():
        assert (grads[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-8, name


def test_experts_in_fp8_that_cannot_stay_so_are_refused_in_a_sentence(tmp_path):
    torch.manual_seed(0)
    fp8, _ = mixtures(tmp_path, "qwen3_moe", (24, 24))
    name = "model.layers.0.mlp.experts.2.up_proj.weight"
    files = load_file(fp8 / "model.safetensors")
    for change, sentence in (
        ({name: files[name].to(torch.float8_e5m2)}, r"cannot stay in FP8: its files hold it in float8_e5m2"),
        ({f"{name}_scale_inv": None}, r"hold 3 of a layer's 4 experts|without a scale"),
        ({f"{name}_scale_inv": torch.ones(3, 3)}, r"has scales of shape \(3, 3\) for a weight of 16 x 32"),
    ):
        changed = {key: value for key, value in {**files, **change}.items() if value is not None}
        save_file(changed, fp8 / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelError, match=sentence):
            load(config(fp8))


def test_a_mixture_stored_in_fp8_trains_and_goes_on_bit_for_bit(train, source, tmp_path):  # noqa: F811
    tokenizer = AutoTokenizer.from_pretrained(tiny.folder())
    torch.manual_seed(0)
    made_family("qwen3_moe", vocab_size=len(tokenizer), max_position_embeddings=512).save_pretrained(tmp_path / "plain")
    tokenizer.save_pretrained(tmp_path / "plain")
    fp8, _ = folders(tmp_path / "plain", tmp_path, (16, 16))
    asked = {
        "model.name": str(fp8), "model.dtype": "bfloat16", "adapter.kind": "lora", "adapter.r": 3,
        "adapter.target_modules": ["q_proj"], "optim.learning_rate": 1e-2, "optim.max_steps": 4, "run.save_steps": 2,
        "adapter.target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        "data.train": [{"path": source(CONVERSATIONS)}],
    }  # fmt: skip
    run = train(asked)
    losses = [event["loss"] for event in lines(run, "metrics")]
    assert losses[-1] < losses[0]
    told = {entry["feature"]: entry for entry in lines(run, "receipt")[0]["entries"]}
    assert told["stored weights"]["effective"] == "float8_e4m3fn"
    assert "24 matrices of experts as they are stored" in told["stored weights"]["detail"]
    assert (told["packed experts"]["effective"], told["packed experts"]["count"]) == ("fp8", 8)
    copied = resumed_from(run, 2, tmp_path / "copy")
    train(folder=copied)
    ends = [load_file(each.checkpoints / "checkpoint-4/adapter_model.safetensors") for each in (run, copied)]
    assert all(torch.equal(weight, ends[1][name]) for name, weight in ends[0].items())


@pytest.mark.parametrize("writer", ["compressed-tensors", "modelopt", "fbgemm_fp8"])
def test_fp8_of_other_writers_is_read_as_that_of_deepseek(plain, tmp_path, writer):
    """Scales of rows, of matrices, or of blocks, under another name and another note in the config."""
    rows = writer == "fbgemm_fp8"
    fp8, twin = folders(plain, tmp_path, (1, 10_000) if rows else (48, 48) if writer == "compressed-tensors" else None)
    files = load_file(fp8 / "model.safetensors")
    files = {name.replace("_scale_inv", "_scale"): weight for name, weight in files.items()}
    save_file(files, fp8 / "model.safetensors", metadata={"format": "pt"})
    weights = {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [48, 48], "symmetric": True}
    notes = {
        "compressed-tensors": {"format": "float-quantized", "config_groups": {"group_0": {"weights": weights}}},
        "modelopt": {"quant_algo": "FP8"},
        "fbgemm_fp8": {"activation_scale_ub": 1200.0},
    }
    told = json.loads((fp8 / "config.json").read_text())
    told["quantization_config"] = {"quant_method": writer, **notes[writer]}
    (fp8 / "config.json").write_text(json.dumps(told))
    assert model_facts(str(fp8)).stored == "fp8"
    found = []
    for folder in (fp8, twin):
        torch.manual_seed(1)
        loaded = load(made := config(folder))
        found.append((loaded, *gradients(add_adapter(loaded.model, made))))
    assert found[0][1] == found[1][1]
    for name, gradient in found[1][2].items():
        assert (found[0][2][name] - gradient).norm() <= 1e-6 * gradient.norm(), name
    assert found[0][0].stored_fp8.layers == LINEARS
    # Whole numbers of four bits in the same wrapping are another format.
    told["quantization_config"] |= {
        "format": "pack-quantized",
        "quant_algo": "NVFP4",
        "quant_method": "compressed-tensors",
    }
    (fp8 / "config.json").write_text(json.dumps(told))
    assert model_facts(str(fp8)).stored == "compressed-tensors (weights of another kind)"
    with pytest.raises(ModelError, match="got one in compressed-tensors"):
        load(config(fp8))


@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_experts_stored_in_fp8_are_scaled_where_that_is_asked_for_and_the_rest_stays(tmp_path, adapter):
    shape = {
        "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 40, "num_experts": 4, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256, "num_experts_per_tok": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape)).save_pretrained(tmp_path / "plain")
    found, held = [], []
    for folder in folders(tmp_path / "plain", tmp_path, (24, 24)):
        torch.manual_seed(1)
        made = config(folder, adapter=adapter, target_parameters=["experts.down_proj"] if adapter == "lora" else [])
        made.model.quantize_moe_experts = adapter == "none"
        loaded = load(made)
        held.append(loaded.stored_fp8)
        model = add_adapter(loaded.model, made)
        found.append((model, *gradients(model)))
    (ours, loss, grads), (_, twin_loss, twin_grads) = found
    assert loss == twin_loss
    assert grads.keys() == twin_grads.keys()
    assert all((grads[name] - twin_grads[name]).norm() <= 1e-6 * twin_grads[name].norm() for name in grads)
    assert (held[0].fused, held[0].packed) == (2 * 4 * 3, False)
    layers = sum(isinstance(module, Fp8Linear) for module in ours.modules())
    assert layers == (2 * 4 if adapter == "lora" else 0)


@pytest.mark.parametrize(("shape", "block"), [((50, 70), (16, 32)), ((64, 64), (48, 48)), ((5, 9), (8, 16))])
def test_each_number_takes_the_scale_of_its_block(shape, block):
    torch.manual_seed(0)
    weight = torch.randn(shape).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-shape[0] // block[0]), -(-shape[1] // block[1])) + 0.5
    wanted = by_hand(weight, scale, block)
    assert torch.equal(dequantized(weight, scale, block, torch.float32), wanted)
    assert torch.equal(dequantized(weight, scale, block, torch.bfloat16), wanted.to(torch.bfloat16))


def in_fp8(layer, scale, block):
    """The layer with its numbers as they would stand in a file."""
    return Fp8Linear(layer, layer.weight.data.to(torch.float8_e4m3fn), scale, block)


def test_a_cast_or_a_copy_of_the_model_leaves_the_numbers_and_their_scales():
    torch.manual_seed(0)
    layer = torch.nn.Linear(20, 12)
    ours = in_fp8(layer, torch.rand(2, 2), (8, 16))
    before, scales = ours.weight.clone().view(torch.uint8), ours.weight_scale_inv.clone()
    for model in (ours.to(torch.bfloat16), copy.deepcopy(ours).double(), ours.cpu()):
        assert torch.equal(model.weight.view(torch.uint8), before)
        assert model.weight.dtype == torch.float8_e4m3fn
        assert torch.equal(model.weight_scale_inv, scales)
        assert not model.weight.requires_grad


@pytest.mark.parametrize(
    ("file", "words"),
    [("../outside.safetensors", "leads out of the folder"), ("evil.bin", "is no safetensors file")],
)
def test_an_index_of_fp8_weights_leads_nowhere_else(plain, tmp_path, file, words):
    fp8, _ = folders(plain, tmp_path, None)
    (fp8 / "model.safetensors").rename(fp8 / file)
    index = {"weight_map": dict.fromkeys(load_file(fp8 / file), file)}
    (fp8 / "model.safetensors.index.json").write_text(json.dumps(index))
    found = stored_fp8(str(fp8), None)
    with pytest.raises(ModelError, match=words):
        load_fp8(Qwen3ForCausalLM, found, {}, keep=False)


def test_what_the_backward_pass_keeps_is_the_fp8_weight():
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        layer = in_fp8(torch.nn.Linear(64, 64), torch.ones(1, 1), (64, 64))
        layer(torch.randn(2, 64, requires_grad=True))
    assert [tensor.dtype for tensor in kept if tensor.numel() == 64 * 64] == [torch.float8_e4m3fn]


def test_adapters_beside_fp8_do_not_take_its_format():
    model = torch.nn.Sequential(in_fp8(torch.nn.Linear(8, 8).bfloat16(), torch.ones(1, 1), (8, 8)))
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["0"]), autocast_adapter_dtype=False)
    assert {weight.dtype for name, weight in adapted.named_parameters() if "lora_" in name} == {torch.bfloat16}


def test_data_parallel_training_leaves_fp8_weights_to_each_process(plain, tmp_path):
    fp8, _ = folders(plain, tmp_path, (48, 48))
    made = config(fp8)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = add_adapter(load_model(made), made)
        loss, found = gradients(DistributedDataParallel(model).module)
        assert loss > 0
        assert len(found) == 2 * LINEARS
        with pytest.raises(RuntimeError, match="scalar type"):  # what happens where it is not told to
            DistributedDataParallel(load_model(made))
    finally:
        dist.destroy_process_group()


def broken(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_weights_in_several_files_take_the_scales_of_those_that_the_index_names(plain, tmp_path):
    fp8, _ = folders(plain, tmp_path, (48, 48))
    whole = load_model(config(fp8, adapter="none"))
    tensors = load_file(fp8 / "model.safetensors")
    halves = dict(enumerate((sorted(tensors)[::2], sorted(tensors)[1::2])))  # a weight and its scale apart
    for number, names in halves.items():
        save_file({name: tensors[name] for name in names}, fp8 / f"model-{number}.safetensors", {"format": "pt"})
    index = {
        "metadata": {},
        "weight_map": {n: f"model-{number}.safetensors" for number, ns in halves.items() for n in ns},
    }
    (fp8 / "model.safetensors.index.json").write_text(json.dumps(index))
    (fp8 / "model.safetensors").rename(fp8 / "consolidated.safetensors")
    again = load_model(config(fp8, adapter="none"))
    for weight, other in zip(again.parameters(), whole.parameters(), strict=True):
        assert torch.equal(weight, other)


def test_files_that_do_not_add_up_are_one_sentence(plain, tmp_path):
    name = "model.layers.0.mlp.up_proj"
    fp8, _ = folders(plain, tmp_path, (48, 48))
    broken(fp8, lambda tensors: tensors.pop(f"{name}.weight_scale_inv"))
    with pytest.raises(ModelError, match=f"{name} is stored in FP8 without a scale"):
        load_model(config(fp8))
    broken(fp8, lambda tensors: tensors.update({f"{name}.weight_scale_inv": torch.ones(2, 2)}))
    with pytest.raises(ModelError, match=r"scales of shape \(2, 2\) for a weight of 128 x 64; blocks of 48 x 48 want"):
        load_model(config(fp8))
    broken(fp8, lambda tensors: tensors.update({f"{name}.weight_scale_inv": torch.ones(3, 2)}))
    with pytest.raises(ModelError, match=r"adapter\.use_dora: must be false"):
        load_model(config(fp8, use_dora=True))
    expert = "model.layers.0.mlp.experts.0.up_proj"
    broken(fp8, lambda tensors: tensors.update({f"{expert}.weight": torch.ones(2, 2).to(torch.float8_e4m3fn)}))
    broken(fp8, lambda tensors: tensors.update({f"{expert}.weight_scale_inv": torch.ones(1, 1)}))
    with pytest.raises(ModelError, match=f"no place for {expert}.weight"):
        load_model(config(fp8))
    broken(fp8, lambda tensors: (tensors.pop(f"{expert}.weight"), tensors.pop(f"{expert}.weight_scale_inv")))
    made = config(fp8, target_parameters=["up_proj.weight"])
    with pytest.raises(ModelError, match=r"target_parameters: 'up_proj.weight' is stored in FP8"):
        add_adapter(load_model(made), made)
    made = config(fp8, modules_to_save=["up_proj"])
    with pytest.raises(ModelError, match=r"modules_to_save: .*up_proj' is held in FP8"):
        add_adapter(load_model(made), made)
    made.model.quantization = "nf4"
    with pytest.raises(ModelError, match=r"must be none for .*, whose weights are stored in FP8; got nf4"):
        load_model(made)


def test_fp8_that_its_config_says_nothing_of_is_never_taken_without_its_scales(plain, tmp_path):
    """As the Model Optimizer wrote it, with its note in a file that transformers does not read."""
    fp8, _ = folders(plain, tmp_path, None)
    told = json.loads((fp8 / "config.json").read_text())
    del told["quantization_config"]
    (fp8 / "config.json").write_text(json.dumps(told))
    (fp8 / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    with pytest.raises(ModelError, match=r"stored in F8_E4M3, and config\.json says nothing of scales") as refused:
        load_model(config(fp8))
    assert model_facts(str(fp8)).flaw == refused.value.full_message, "check refuses what the training refuses"
    told["quantization_config"] = json.loads("{" + refused.value.full_message.partition(": {")[2].rstrip("."))
    (fp8 / "config.json").write_text(json.dumps(told))
    assert isinstance(load_model(config(fp8)).model.layers[0].mlp.up_proj, Fp8Linear), "the way out is one"


@pytest.mark.parametrize("note", [
    {"quant_method": "compressed-tensors", "format": [], "config_groups": {"a": {"weights": {"type": [], "num_bits": {}}}}},
    {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": {"weights": {"num_bits": {}}}}},
    {"quant_method": "gptq", "bits": []}, {"quant_method": "awq", "zero_point": "x"},
    {"quant_method": "fp8", "weight_block_size": ["a", None]}, {"quant_method": "fp8", "weight_block_size": [0, 128]},
], ids=str)  # fmt: skip
def test_a_strange_note_on_quantization_is_none_that_is_served_or_names_no_block(note):
    method, form, _ = stored_as(note).partition(" (")
    assert method == note["quant_method"]
    assert bool(form) == (method != "fp8")
    assert packed_size(note) == 0
    assert block_of(note) is None


def test_a_run_on_fp8_learns_and_its_receipt_says_so(plain, tmp_path, train, source):  # noqa: F811
    fp8, _ = folders(plain, tmp_path, (48, 48))
    settings = {"model.name": str(fp8), "model.dtype": "bfloat16", "adapter.kind": "lora", "adapter.r": 4}
    run = train({**settings, "data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 6})
    said = {entry["feature"]: entry for event in lines(run, "receipt") for entry in event["entries"]}
    assert said["stored weights"]["effective"] == "float8_e4m3fn"
    assert said["stored weights"]["count"] == LINEARS
    assert "blocks of 48 x 48" in said["stored weights"]["detail"]
    losses = [event["loss"] for event in lines(run, "metrics") if "loss" in event]
    assert losses[-1] < losses[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_card_the_weights_stay_in_fp8_and_the_gradients_are_the_twins(plain, tmp_path, compiled):
    fp8, twin = folders(plain, tmp_path, (48, 48))
    found = []
    for folder in (fp8, twin):
        torch.manual_seed(1)
        made = config(folder, "bfloat16")
        model = add_adapter(load_model(made), made).to("cuda")
        if compiled and folder is fp8:
            compile_layers(list(decoder_layers(model)), {})
        found.append((*gradients(model), sum(w.numel() * w.element_size() for w in model.parameters())))
    torch._dynamo.reset()
    (loss, grads, size), (twin_loss, twin_grads, twin_size) = found
    assert loss == pytest.approx(twin_loss, rel=1e-2 if compiled else 1e-6)
    for name, gradient in twin_grads.items():
        apart = (grads[name].double() - gradient.double()).norm() / gradient.double().norm()
        assert apart <= (5e-2 if compiled else 1e-6), name
    assert twin_size - size == NUMBERS
