"""Adapters' products taken together are PEFT's own sums: outputs, gradients, adapters off, and what is left to PEFT."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode

from engine.features.compile.grouped import group
from engine.features.fused_norm_rope.apply import fuse
from tests.engine.features.conftest import tiny_model


def adapted(**settings):
    """A tiny model with adapters that already say something."""
    torch.manual_seed(0)
    settings = {"r": 2, "lora_alpha": 6, "target_modules": "all-linear", **settings}
    model = get_peft_model(tiny_model(), LoraConfig(**settings)).double()
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    return model


def grouped(model):
    return group(list(model.get_base_model().model.layers))


def step(model, ids):
    model.zero_grad()
    out = model(ids, labels=ids)
    out.loss.backward()
    return out.logits, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"], ["k_proj", "up_proj", "down_proj"]])
def test_outputs_and_gradients_are_pefts(targets, fused):
    model, ids = adapted(target_modules=targets), torch.randint(128, (2, 9))
    if fused:
        fuse([layer.self_attn for layer in model.get_base_model().model.layers])
    logits, gradients = step(model, ids)
    with model.disable_adapter(), torch.no_grad():
        off = model(ids).logits
    count, undo = grouped(model)
    assert count == (2 if targets == ["q_proj", "v_proj"] else 4)
    ours, found = step(model, ids)
    torch.testing.assert_close(ours, logits, rtol=1e-11, atol=1e-13)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-13)
    with model.disable_adapter(), torch.no_grad():
        assert torch.equal(model(ids).logits, off)
    undo()
    assert torch.equal(step(model, ids)[0], logits)


def test_a_group_takes_one_product_for_what_were_three():
    model, ids = adapted(), torch.randint(128, (2, 9))
    with Products() as before:
        step(model, ids)
    grouped(model)
    with Products() as after:
        step(model, ids)
    # Two layers: queries, keys and values save two products each way of A's, gate and up one; the backward pass has
    # the input's gradient beside A's, but for the first layer's queries, keys and values.
    assert before.count - after.count == 2 * 3 + 2 * 3 + (3 + 1)


@pytest.mark.parametrize("settings", [{"lora_dropout": 0.5}, {"use_dora": True}, {"lora_bias": True}])
def test_what_peft_does_beside_the_products_is_left_to_it(settings):
    model, ids = adapted(**settings), torch.randint(128, (2, 9))
    torch.manual_seed(3)
    logits, _ = step(model.train(), ids)
    assert grouped(model)[0] == 0
    torch.manual_seed(3)
    assert torch.equal(step(model, ids)[0], logits)


def test_a_second_adapter_and_a_merged_one_are_seen_when_they_come():
    model, ids = adapted(), torch.randint(128, (2, 9))
    grouped(model)
    model.add_adapter("other", LoraConfig(r=3, target_modules="all-linear"))
    model.double().set_adapter("other")
    with torch.no_grad():
        other = model(ids).logits
        model.set_adapter("default")
        one = model(ids).logits
        model.merge_adapter()
        torch.testing.assert_close(model(ids).logits, one)
        model.unmerge_adapter()
        with model.disable_adapter():
            torch.testing.assert_close(model(ids).logits, other)  # B of a new adapter is zero
    assert not torch.allclose(one, other)
