"""Rounded layers compute what plain torch computes from the rounded numbers, learn like the others, and leave no trace."""

from __future__ import annotations

import copy
import sys
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3ForCausalLM

from engine.config.facts import Facts
from engine.errors import ModelError
from engine.facts.model_shape import model_facts
from engine.features.built import Built
from engine.features.gradient_checkpointing.tiers import use_tier
from engine.features.quantization_aware.apply import apply
from engine.planning import memory_model
from engine.rules import read
from tests.engine.features.conftest import built_of, tiny_model

pytest.importorskip("torchao")
LINEARS = 2 * 7


def config(value, recipe="tensorwise"):
    return SimpleNamespace(kernels=SimpleNamespace(quantization_aware=value, fp8_recipe_name=recipe))


def rounded(model, value, recipe="tensorwise", **more):
    """Converts the model (FP8 emulated) and gives what was applied."""
    applied = apply(config(value, recipe), built_of(SimpleNamespace(model=model, **more)), emulate=value == "fp8")
    assert applied is not None
    return applied


def one_layer(value, recipe="tensorwise"):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(32, 48, bias=True))
    rounded(model, value, recipe)
    x = torch.randn(5, 32, requires_grad=True)
    weights = torch.randn(5, 48)
    return model[0], x, weights


def int8(values):
    """Rounded by row to int8 around zero, and where that stays inside -128 to 127."""
    scale = values.abs().amax(1, keepdim=True) / 127.5
    whole = torch.round(values * (1 / scale))
    return whole.clamp(-128, 127) * scale, (whole >= -128) & (whole <= 127)


def int8_inputs(values):
    """The same by token, from its least to its greatest number."""
    low, high = values.amin(-1, keepdim=True).clamp(max=0), values.amax(-1, keepdim=True).clamp(min=0)
    scale = (high - low) / 255
    zero = torch.clamp(-128 - torch.round(low / scale), -128, 127)
    whole = torch.round(values * (1 / scale)) + zero
    return (whole.clamp(-128, 127) - zero) * scale, (whole >= -128) & (whole <= 127)


def fp8(values, dtype, dim=None):
    """Rounded to `dtype` with one scale for all, or for each line along `dim`, a power of two as torchao has it there."""
    most = values.abs().amax() if dim is None else values.abs().amax(dim, keepdim=True)
    scale = torch.finfo(dtype).max / most.clamp(min=1e-12)
    if dim is not None:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return (values * scale).to(dtype).float() / scale


def apart(ours, theirs):
    return ((ours - theirs).norm() / theirs.norm()).item()


def test_int8_rounds_weights_by_row_and_inputs_by_token_and_gradients_pass_straight_through():
    layer, x, weights = one_layer(True)
    out = layer(x)
    (out * weights).sum().backward()
    (round_x, inside_x), (round_w, inside_w) = int8_inputs(x.detach()), int8(layer.weight.detach())
    assert apart(out, round_x @ round_w.T + layer.bias) < 1e-5
    assert 1e-3 < apart(out, x @ layer.weight.T + layer.bias) < 0.02
    assert apart(x.grad, weights @ round_w * inside_x) < 1e-5
    assert apart(layer.weight.grad, weights.T @ round_x * inside_w) < 1e-5
    assert inside_w.float().mean() > 0.95
    assert inside_x.float().mean() > 0.95


def test_int8_is_refused_where_a_bound_takes_the_gradient(monkeypatch):
    clamp = torch.Tensor.clamp
    monkeypatch.setattr(torch.Tensor, "clamp", lambda x, low, high: clamp(x, low, high) * (x.detach() < high))
    with pytest.raises(ModelError, match=r"must be false or fp8 with torch .*; got true"):
        one_layer(True)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_fp8_multiplies_the_rounded_numbers_in_all_three_products(recipe):
    layer, x, weights = one_layer("fp8", recipe)
    out = layer(x)
    (out * weights).sum().backward()
    e4m3, rows = torch.float8_e4m3fn, recipe == "rowwise"
    e5m2 = e4m3 if rows else torch.float8_e5m2
    own, w = (lambda dim: dim if rows else None), layer.weight.detach()
    forward = fp8(x.detach(), e4m3, own(1)) @ fp8(w, e4m3, own(1)).T + layer.bias
    assert apart(out, forward) < 1e-6
    assert apart(x.grad, fp8(weights, e5m2, own(1)) @ fp8(w, e4m3, own(0))) < 1e-6
    assert apart(layer.weight.grad, fp8(weights, e5m2, own(0)).T @ fp8(x.detach(), e4m3, own(0))) < 1e-6
    assert 5e-3 < apart(out, x @ layer.weight.T + layer.bias) < 0.08


@pytest.mark.parametrize(("value", "name"), [(True, "FakeQuantizedLinear"), ("fp8", "Float8Linear")])
def test_every_layer_but_head_adapter_and_odd_sizes_is_converted_and_counted(value, name):
    model = tiny_model()
    applied = rounded(model, value)
    kinds = [type(module).__name__ for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert kinds.count(name) == applied.count == LINEARS
    assert kinds.count("Linear") == 1
    assert "left out: 1 head" in applied.detail
    assert applied.requested == value

    model = get_peft_model(tiny_model(), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"))
    applied = rounded(model, value)
    assert applied.count == LINEARS
    assert f"left out: 1 head, {2 * LINEARS} of adapters" in applied.detail
    assert value is True or "frozen weights: forward products and input gradients in fp8" in applied.detail

    odd = rounded(tiny_model(intermediate_size=72), value)
    assert odd.count == (LINEARS if value is True else LINEARS - 6)
    assert value is True or "6 of sizes that are no multiple of 16" in odd.detail


def test_a_reference_copy_rounds_as_the_policy_does():
    model = tiny_model()
    reference = copy.deepcopy(model)
    assert rounded(model, True, ref_model=reference, model_wrapped=model).count == 2 * LINEARS
    ids = torch.arange(12)[None]
    assert torch.equal(model(ids).logits, reference(ids).logits)


def test_the_undo_gives_the_trained_weights_back_to_the_old_layers():
    model = tiny_model()
    before = dict(model.named_modules())
    plain = model(torch.arange(12)[None]).logits
    applied = rounded(model, "fp8")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    applied.undo()
    assert dict(model.named_modules()) == before
    for parameter in model.parameters():
        parameter.data.div_(1.5)
    assert torch.allclose(model(torch.arange(12)[None]).logits, plain, atol=1e-6)


@pytest.mark.parametrize("first", [True, "fp8"])
@pytest.mark.parametrize("second", [True, "fp8"])
def test_one_kind_of_rounding_never_meets_the_other(first, second):
    model = tiny_model()
    rounded(model, first)
    with pytest.raises(ModelError, match="one kind of rounding, once"):
        rounded(model, second)
    others = {"FakeQuantizedLinear", "Float8Linear"} & {type(module).__name__ for module in model.modules()}
    assert others == {"FakeQuantizedLinear" if first is True else "Float8Linear"}


@pytest.mark.parametrize("value", [1, "int8", "true", "FP8", None, 0])
def test_a_value_of_neither_kind_converts_nothing(value):
    model = tiny_model()
    with pytest.raises(ModelError, match="must be false, true or fp8"):
        apply(config(value), Built(model))
    assert {type(module) for module in model.modules() if isinstance(module, torch.nn.Linear)} == {torch.nn.Linear}


def test_what_is_missing_is_one_sentence(monkeypatch):
    with pytest.raises(ModelError, match="no plain linear layers"):
        rounded(torch.nn.Sequential(torch.nn.Embedding(4, 4)), True)
    if not torch.cuda.is_available():
        with pytest.raises(ModelError, match="must be false or true without a GPU; got fp8"):
            apply(config("fp8"), Built(tiny_model()))
    for name in ("torchao.float8", "torchao.quantization"):
        monkeypatch.setitem(sys.modules, name, None)
    for value in (True, "fp8"):
        with pytest.raises(ModelError, match="package torchao") as problem:
            rounded(tiny_model(), value)
        assert "pip install torchao" in problem.value.hint


@pytest.mark.parametrize("value", [True, "fp8"])
def test_saved_weights_are_plain_and_load_without_torchao(value, tmp_path):
    model = tiny_model().to(torch.bfloat16)
    before = {name: (weight.dtype, weight.clone()) for name, weight in model.state_dict().items()}
    rounded(model, value)
    model.save_pretrained(tmp_path)
    assert "torchao" not in (tmp_path / "config.json").read_text()
    loaded = Qwen3ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {type(module).__module__ for module in loaded.modules() if isinstance(module, torch.nn.Linear)} == {
        "torch.nn.modules.linear"
    }
    for name, weight in loaded.state_dict().items():
        assert weight.dtype == before[name][0]
        assert torch.equal(weight, before[name][1])


@pytest.mark.parametrize("tier", ["selective", "medium", "full"])
@pytest.mark.parametrize("value", [True, "fp8"])
def test_layers_that_are_computed_again_round_the_same_again(value, tier):
    found = []
    for checkpointing in (False, True):
        model = tiny_model()
        rounded(model, value)
        if checkpointing and tier != "full":
            use_tier(model, tier)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        ids = torch.arange(24)[None]
        loss = model.train()(ids, labels=ids, use_cache=False).loss
        loss.backward()
        found.append((loss, *(parameter.grad for parameter in model.parameters())))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


def kept(model, tokens):
    """Bytes of what the backward pass keeps, the model's own weights left out."""
    own, held = {weight.untyped_storage()._cdata for weight in model.parameters()}, {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            held[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.arange(tokens)[None], labels=torch.arange(tokens)[None], use_cache=False)
    return sum(storage.nbytes() for storage in held.values())


@pytest.mark.parametrize(("adapter", "dtype"), [("none", "bfloat16"), ("none", "float32"), ("lora", "bfloat16")])
def test_the_estimate_knows_what_int8_rounding_keeps(adapter, dtype):
    mapping = {
        "model": {"name": "builtin/tiny", "dtype": dtype},
        "data": {"max_length": 128},
        "adapter": {"kind": adapter},
    }
    mapping["optim"] = {"per_device_train_batch_size": 1}
    found, known = [], Facts(model=model_facts("builtin/tiny"))
    for value in (False, True):
        settings = read({**mapping, "kernels": {"quantization_aware": value}}).config
        model = tiny_model(512, 4, hidden_size=64, intermediate_size=128, num_key_value_heads=4, head_dim=16).to(
            getattr(torch, dtype)
        )
        if adapter == "lora":
            model = get_peft_model(
                model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"), autocast_adapter_dtype=False
            )
        if value:
            rounded(model, value)
        found.append((kept(model, 128), memory_model.memory(settings, known, checkpointing=False)["activations"]))
    (plain, estimated), (ours, estimated_ours) = found
    assert estimated_ours - estimated == pytest.approx(ours - plain, rel=0.3)


def losses_of(model, stride, rate):
    """Twenty steps on counting by `stride`."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    losses = []
    for number in range(20):
        torch.manual_seed(number)
        ids = (torch.randint(64, (4, 1)) + stride * torch.arange(24)) % 128
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def taught():
    """A model that has learned to count, in bfloat16."""
    model = tiny_model().to(torch.bfloat16)
    losses_of(model, 1, 3e-3)
    return model


@pytest.mark.parametrize("lora", [pytest.param(False, marks=pytest.mark.slow), True])
def test_twenty_steps_learn_as_bfloat16_does(taught, lora):
    def learned(value):
        model = copy.deepcopy(taught) if lora else tiny_model().to(torch.bfloat16)
        if lora:
            torch.manual_seed(1)
            adapter = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=32, target_modules="all-linear")
            model = get_peft_model(model, adapter, autocast_adapter_dtype=False)
        if value:
            rounded(model, value)
        return losses_of(model, 3 if lora else 1, 3e-3)

    plain = learned(False)
    assert plain[-1] < (0.9 if lora else 0.75) * plain[0]
    for value in (True, "fp8"):
        ours = learned(value)
        assert ours != plain
        apart = [abs(a - b) / b for a, b in zip(ours, plain, strict=True)]
        # bfloat16 itself lies up to 0.024 from float32 here, and each processor rounds its products in an order of its own
        assert max(apart) < 0.03
        assert sum(apart) / len(apart) < 0.005
