"""FP8 products on a card: what the emulation says they are, and with frozen weights two of them in place of three."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model

from engine.features.built import Built, decoder_layers
from engine.features.compile.apply import compile_layers
from engine.features.quantization_aware.apply import apply
from tests.engine.features.conftest import tiny_model

pytest.importorskip("torchao")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="no card with FP8 products"
    ),
]
SHAPE = {"layers": 2, "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8, "head_dim": 32}


def model_of(recipe=None, *, lora=False):
    model = tiny_model(**SHAPE).to("cuda", torch.bfloat16)
    if lora:
        torch.manual_seed(1)
        adapter = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear", init_lora_weights=False)
        model = get_peft_model(model, adapter, autocast_adapter_dtype=False)
    if recipe is not None:
        config = SimpleNamespace(kernels=SimpleNamespace(quantization_aware="fp8", fp8_recipe_name=recipe))
        assert apply(config, Built(model)).count == 2 * 7
    return model


def step(model):
    ids = torch.randint(128, (3, 171), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.item(), {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def apart(ours, theirs):
    assert ours.keys() == theirs.keys()
    return max(((ours[name] - theirs[name]).norm() / theirs[name].norm().clamp(min=1e-9)).item() for name in ours)


def one_layer(recipe, *, emulate=False):
    """Output and both gradients of a layer; 513 tokens: no multiple of 16, which the weight gradient's product wants."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(256, 768, device="cuda", dtype=torch.bfloat16))
    if recipe is not None:
        config = SimpleNamespace(kernels=SimpleNamespace(quantization_aware="fp8", fp8_recipe_name=recipe))
        apply(config, Built(model), emulate=emulate)
    x = torch.randn(3, 171, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    out = model(x)
    (out * torch.randn_like(out)).sum().backward()
    return {"out": out.double(), "x": x.grad.double(), "weight": model[0].weight.grad.double()}


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_the_cards_products_are_those_of_the_emulation(recipe):
    plain, emulated, ours = one_layer(None), one_layer(recipe, emulate=True), one_layer(recipe)
    for name in ours:
        one = {name: ours[name]}
        assert apart(one, {name: emulated[name]}) < 1e-2
        assert 1e-2 < apart(one, {name: plain[name]}) < 0.1


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("lora", [False, True])
def test_a_model_in_fp8_has_nearly_the_loss_and_the_gradients_of_bfloat16(recipe, lora):
    plain, ours = step(model_of(lora=lora)), step(model_of(recipe, lora=lora))
    assert ours[0] == pytest.approx(plain[0], rel=2e-2)
    assert apart(ours[1], plain[1]) < 0.35


def test_int8_rounding_is_compiled_with_its_layer():
    found = []
    for compiled in (False, True):
        model = tiny_model(**SHAPE).to("cuda", torch.bfloat16)
        config = SimpleNamespace(kernels=SimpleNamespace(quantization_aware=True, fp8_recipe_name="tensorwise"))
        assert apply(config, Built(model)).count == 2 * 7
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        if compiled:
            compile_layers(list(decoder_layers(model)), {})
        found.append(step(model))
    torch._dynamo.reset()
    assert found[1][0] == pytest.approx(found[0][0], rel=5e-3)
    assert apart(found[1][1], found[0][1]) < 0.2


def products(model):
    """FP8 products in one step of the model."""
    step(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        step(model)
    return sum(event.count for event in seen.key_averages() if event.key == "aten::_scaled_mm")


def test_compiled_layers_with_frozen_weights_skip_the_weight_gradients_product():
    for lora, count in ((True, 2), (False, 3)):
        model = model_of("tensorwise", lora=lora)
        plain = step(model)
        undo = compile_layers(list(decoder_layers(model)), {})
        ours = step(model)
        assert ours[0] == pytest.approx(plain[0], rel=5e-3)
        assert apart(ours[1], plain[1]) < 0.3
        # the first layer's input takes no gradient where all below it is frozen
        assert count * 14 - 3 <= products(model) <= count * 14
        undo()
        torch._dynamo.reset()
