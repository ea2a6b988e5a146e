"""FP8 products on a card: what the emulation says they are, and with frozen weights two of them in place of three."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model

from engine.patches.compiled import compile_layers, decoder_layers
from engine.patches.rounding import quantization_aware
from tests.engine.patches.conftest import tiny_model

pytest.importorskip("torchao")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="no card with FP8 products"
    ),
]
SHAPE = {"layers": 2, "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8, "head_dim": 32}


def model_of(recipe=None, *, emulate=False, lora=False):
    model = tiny_model(**SHAPE).to("cuda", torch.bfloat16)
    if lora:
        torch.manual_seed(1)
        adapter = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear", init_lora_weights=False)
        model = get_peft_model(model, adapter, autocast_adapter_dtype=False)
    if recipe is not None:
        config = SimpleNamespace(kernels=SimpleNamespace(quantization_aware="fp8", fp8_recipe_name=recipe))
        assert quantization_aware(config, SimpleNamespace(model=model), emulate=emulate).count == 2 * 7
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


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("lora", [False, True])
def test_the_cards_products_are_those_of_the_emulation(recipe, lora):
    # 513 tokens: no multiple of 16, which is the inner size of the weight gradient's product
    plain = step(model_of(lora=lora))
    ours, emulated = step(model_of(recipe, lora=lora)), step(model_of(recipe, emulate=True, lora=lora))
    assert ours[0] == pytest.approx(emulated[0], rel=1e-3)
    assert ours[0] == pytest.approx(plain[0], rel=2e-2)
    # the emulation multiplies in float32; the card's sums and results are rounded in between
    assert apart(ours[1], emulated[1]) < 0.5 * apart(ours[1], plain[1]) + 0.02
    assert apart(ours[1], plain[1]) < 0.6


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
        undo = compile_layers(list(decoder_layers(SimpleNamespace(model=model))), {})
        ours = step(model)
        assert ours[0] == pytest.approx(plain[0], rel=5e-3)
        assert apart(ours[1], plain[1]) < 0.3
        # the first layer's input takes no gradient where all below it is frozen
        assert count * 14 - 3 <= products(model) <= count * 14
        undo()
        torch._dynamo.reset()
