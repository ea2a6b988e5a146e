"""Features act on one model in any order with the numbers of the plain model, and leave nothing when taken back."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from trl.trainer.utils import add_fused_lm_head

from engine.config.schema import read
from engine.patches import attention, head, lora, tiled
from engine.patches.compiled import decoder_layers
from tests.engine.patches.families import batches, made

IDS = batches(1, 2, 24)[0]
CONFIG = read(
    {
        "kernels": {"use_cut_ce": True, "fused_lora": True}, "memory": {"tiled_mlp": True, "tiled_mlp_tokens": 16},
        "data": {"max_length": 24},
    }
).config  # fmt: skip


def adapted():
    """A model with adapters that say something, in float64, and TRL's head."""
    model = get_peft_model(made("qwen3", num_hidden_layers=1), LoraConfig(r=2, target_modules="all-linear")).double()
    torch.manual_seed(3)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    add_fused_lm_head(model.get_base_model())
    return model


FEATURES = {
    "head": lambda trainer: head.cut_cross_entropy(CONFIG, trainer).undo,
    "attention": lambda trainer: attention.fuse(list(attention.attention_layers(trainer))),
    "lora": lambda trainer: lora.fuse(list(decoder_layers(trainer)))[1],
    "tiles": lambda trainer: tiled.tiled_mlp(CONFIG, trainer.model.get_base_model()).undo,
}


def gradients(model):
    model.zero_grad()
    model(input_ids=IDS, labels=IDS, fused_lm_head=True).loss.backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}


@pytest.fixture(scope="module")
def model():
    """One for all orders: what an order leaves behind shows in the next."""
    return adapted()


@pytest.fixture(scope="module")
def plain(model):
    return {name: gradient.clone() for name, gradient in gradients(model).items()}


@pytest.mark.parametrize("order", itertools.permutations(FEATURES), ids="-".join)
def test_any_order_gives_the_plain_gradients_and_leaves_no_trace(order, model, plain):
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    trainer = SimpleNamespace(model=model)
    undos = [FEATURES[name](trainer) for name in order]
    found = gradients(model)
    for name, gradient in plain.items():
        # The class computes its norms in float32, the kernel's reference in float64.
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
    for undo in reversed(undos):
        undo()
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    again = gradients(model)
    assert all(torch.equal(again[name], gradient) for name, gradient in plain.items())
