"""Adapters switched off by a factor of 0: the base model's numbers in the same code, and what is left to PEFT."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from trl.trainer.utils import use_adapter

from engine.features.compile.gate import gated
from engine.features.compile.grouped import group
from tests.engine.features.compile.test_grouped import adapted, step
from tests.engine.features.conftest import tiny_model
from tests.engine.features.families import made


def layers(model):
    return list(model.get_base_model().model.layers)


def gate_all(model):
    gate, reason, undo = gated(model, layers(model))
    assert (reason, gate is None) == ("", False)
    _, undo_groups = group(layers(model), gate)
    return gate, lambda: (undo_groups(), undo())


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "o_proj", "up_proj", "lm_head"]])
def test_with_the_adapter_off_the_model_is_its_base_and_with_it_on_nothing_changed(targets):
    model, ids = adapted(target_modules=targets), torch.randint(128, (2, 9))
    logits, gradients = step(model, ids)
    with torch.no_grad(), model.disable_adapter():
        base = model(ids).logits
    gate, undo = gate_all(model)
    ours, found = step(model, ids)
    torch.testing.assert_close(ours, logits, rtol=1e-11, atol=1e-13)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-13)
    with torch.no_grad(), model.disable_adapter():
        assert gate.value == 0
        assert torch.equal(model(ids).logits, base)
        with model.disable_adapter():
            assert torch.equal(model(ids).logits, base)
        assert torch.equal(model(ids).logits, base)
    assert all(weight.requires_grad for name, weight in model.named_parameters() if "lora_" in name)
    assert torch.equal(step(model, ids)[0], ours)
    undo()
    assert "disable_adapter" not in vars(model)
    assert torch.equal(step(model, ids)[0], logits)


def test_switching_off_between_a_forward_pass_and_its_backward_leaves_the_gradients():
    model, ids = adapted(), torch.randint(128, (2, 9))
    gradients = step(model, ids)[1]
    gate_all(model)
    model.zero_grad()
    loss = model(ids, labels=ids).loss
    with torch.no_grad(), model.disable_adapter():
        model(ids)
    loss.backward()
    for name, weight in model.named_parameters():
        if name in gradients:
            torch.testing.assert_close(weight.grad, gradients[name], rtol=1e-10, atol=1e-13)


def test_a_head_trained_beside_the_layers_is_the_base_models_while_adapters_are_off():
    model, ids = adapted(modules_to_save=["lm_head"]), torch.randint(128, (2, 9))
    with torch.no_grad():
        base = model.get_base_model().lm_head
        base.modules_to_save["default"].weight.add_(1.0)
        with model.disable_adapter():
            off = model(ids).logits
    gate_all(model)
    with torch.no_grad():
        on = model(ids).logits
        with model.disable_adapter():
            assert torch.equal(model(ids).logits, off)
        assert torch.equal(model(ids).logits, on)
    assert base.modules_to_save["default"].weight.requires_grad


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"use_dora": True}, "Dora"),
        ({"lora_dropout": 0.1}, "dropout"),
        ({"lora_bias": True}, "own bias"),
        ({"modules_to_save": ["input_layernorm"]}, "ModulesToSaveWrapper"),
    ],
)
def test_what_a_factor_does_not_reach_is_left_to_peft_and_named(settings, reason):
    model, ids = adapted(**settings), torch.randint(128, (2, 9))
    with torch.no_grad(), model.disable_adapter():
        off = model(ids).logits
    gate, why, _ = gated(model, layers(model))
    assert gate is None
    assert reason in why
    assert "disable_adapter" not in vars(model)
    with torch.no_grad(), model.disable_adapter():
        assert torch.equal(model(ids).logits, off)


def test_with_adapters_on_experts_the_reference_is_the_base_model():
    """PEFT multiplies their two matrices with each other: a factor in the pass of the first one is never asked."""
    model, ids = made("qwen3_moe"), torch.randint(50, (2, 9))
    experts = ["experts.gate_up_proj", "experts.down_proj"]
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], target_parameters=experts))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    with torch.no_grad(), model.disable_adapter():
        off = model(ids).logits
    gate, why, _ = gated(model, layers(model))
    assert gate is None
    assert "an adapter on experts" in why
    with torch.no_grad(), model.disable_adapter():
        assert torch.equal(model(ids).logits, off)


def test_a_model_without_adapters_has_no_gate_and_no_reason():
    plain = tiny_model()
    assert gated(plain, list(plain.model.layers))[:2] == (None, "")
    head = get_peft_model(plain, LoraConfig(target_modules=["lm_head"]))
    assert gated(head, layers(head))[1] == "no LoRA in the layers"


def with_copy(model):
    """As TRL keeps the adapter that a model came with, and reads the reference from it."""
    model.add_adapter("ref", model.peft_config["default"])
    for name, weight in list(model.named_parameters()):
        if ".default." in name:
            model.get_parameter(name.replace(".default.", ".ref.")).data.copy_(weight.data)
    return model.double()


def test_an_adapter_that_goes_on_from_another_run_keeps_its_copy_as_the_reference():
    model, ids = with_copy(adapted()), torch.randint(128, (2, 9))
    with torch.no_grad(), use_adapter(model, "ref"):
        before = model(ids).logits
    gate, why, _ = gated(model, layers(model))
    assert gate is None
    assert "learnt something before" in why
    with torch.no_grad(), use_adapter(model, "ref"):
        assert torch.equal(model(ids).logits, before)
