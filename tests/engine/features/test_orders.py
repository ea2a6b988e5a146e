"""Features act on one model in any order with the numbers of the plain model, and leave nothing when taken back."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from trl.trainer.utils import add_fused_lm_head

from engine.compat import instances
from engine.features.compile import apply as compiled
from engine.features.compile import fallback, gate, grouped, one_graph
from engine.features.cut_cross_entropy import apply as cut_cross_entropy
from engine.features.fused_lora import apply as fused_lora
from engine.features.fused_norm_rope import apply as fused_norm_rope
from engine.features.sequence import Features
from engine.features.tiled_mlp import apply as tiled_mlp
from engine.rules import read
from tests.engine.features.conftest import built_of
from tests.engine.features.families import batches, made

IDS = batches(1, 2, 24)[0]
CONFIG = read(
    {
        "kernels": {"use_cut_ce": True, "fused_lora": True}, "memory": {"tiled_mlp": True, "tiled_mlp_tokens": 16},
        "data": {"max_length": 24},
    }
).config  # fmt: skip
CONFIG_COMPILED = read({"kernels": {"torch_compile": True}}).config


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
    "head": lambda trainer: cut_cross_entropy.apply(CONFIG, built_of(trainer)).undo,
    "attention": lambda trainer: fused_norm_rope.fuse(fused_norm_rope.attention_layers(built_of(trainer))),
    "lora": lambda trainer: fused_lora.fuse(built_of(trainer).decoder_layers())[1],
    "tiles": lambda trainer: tiled_mlp.prepare(CONFIG, built_of(trainer)).undo,
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


@pytest.mark.parametrize("feature", ["lora", "compiled"])
@pytest.mark.parametrize("puts", [1, 2, -1], ids=["at once", "after one change", "at its last change"])
def test_a_feature_that_fails_half_way_leaves_no_trace(monkeypatch, model, feature, puts):
    """As one does that is timed: its failure is told, and the run goes on without it."""
    trainer = SimpleNamespace(model=model, training_step=lambda *_: None, beta=0.1, ref_model=None)
    apply = {
        "lora": FEATURES["lora"],
        "compiled": lambda trainer: compiled.apply(CONFIG_COMPILED, built_of(trainer)).undo,
    }
    before, count = traces(trainer), []
    put = instances.put
    monkeypatch.setattr(compiled, "refusal", lambda: None)

    def failing(*args):
        count.append(args)
        if len(count) == puts:
            raise RuntimeError("no")
        return put(*args)

    for module in (compiled, fallback, gate, grouped, fused_lora, one_graph):
        monkeypatch.setattr(module, "put", failing, raising=False)
    if puts < 0:
        apply[feature](trainer)()
        assert traces(trainer) == before
        puts = len(count)
        count.clear()
        assert puts >= 3
    with pytest.raises(RuntimeError, match="no"):
        apply[feature](trainer)
    assert traces(trainer) == before


def traces(trainer):
    """What features may put on instances: attributes of modules by what they are, of the model's config, of the trainer."""
    seen = {
        name: {key: value for key, value in vars(module).items() if not key.startswith(("_parameters", "_buffers"))}
        for name, module in trainer.model.named_modules()
    }
    return seen, dict(vars(trainer.model.get_base_model().config)), dict(vars(trainer))


def test_what_acted_last_is_taken_back_first_and_once():
    features, taken_back = Features(CONFIG), []
    for name in "abc":
        features._add(lambda name=name: taken_back.append(name))
    features.undo()
    features.undo()
    assert taken_back == ["c", "b", "a"]
