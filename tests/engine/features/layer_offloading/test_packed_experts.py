"""Packed experts stream as plain weights do: their bits leave with their layer and come back, and nothing else changes.

A card is played by the processor: storages are emptied and filled as there, copies just do not overlap.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from engine.builtin import tiny
from engine.features.layer_offloading import layer_stream
from engine.features.layer_offloading.apply import frozen_weights
from engine.features.layer_offloading.layer_stream import LayerStream, Weights
from engine.kernels.experts.packed import PackedExperts
from engine.models.packed_experts import packed_experts
from tests.engine.features.families import made
from tests.engine.features.packed_experts.test_apply import adapted, learned, settings

LAYERS = 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Tiny mixtures of more layers than a card holds at once."""
    found, tokenizer = {}, AutoTokenizer.from_pretrained(tiny.folder())
    for family in ("qwen3_moe", "gpt_oss"):
        found[family] = tmp_path_factory.mktemp(family)
        shape = {"vocab_size": len(tokenizer), "max_position_embeddings": 512, "num_hidden_layers": LAYERS}
        made(family, **shape).save_pretrained(found[family])
        tokenizer.save_pretrained(found[family])
    return found


class Played:
    """A stream or an event of the card that is done at once."""

    def __init__(self, *_: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def wait_event(self, *_: Any) -> None:
        pass


@pytest.fixture
def played_card(monkeypatch):
    monkeypatch.setattr(layer_stream, "locked", lambda size: torch.empty(size, dtype=torch.uint8))
    for name in ("Stream", "Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, Played)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)


def streaming(model):
    layers = list(model.get_base_model().model.layers)
    device = torch.device("cpu")
    stream = LayerStream(layers, [Weights(list(frozen_weights(layer)), device) for layer in layers], device)
    stream.attach()
    return stream


def here(model):
    """How many layers have the numbers of their experts on the card."""
    layers = model.get_base_model().model.layers
    held = [[weight for _, weight in packed_experts(layer)] for layer in layers]
    assert all(held)
    return sum(any(each.held.numbers.untyped_storage().nbytes() for each in weights) for weights in held)


@pytest.mark.parametrize("kind", ["nf4", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_streamed_they_learn_the_same_to_the_bit(folders, played_card, kind, checkpointed):
    model, _ = adapted(settings(folders["qwen3_moe"], kind))
    if checkpointed:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    loss, gradients = learned(model)
    numbers = {name: weight.all_unpacked() for name, weight in packed_experts(model)}
    parameters = {name: id(weight) for name, weight in model.named_parameters()}
    stream = streaming(model)
    assert {name: id(weight) for name, weight in model.named_parameters()} == parameters
    assert here(model) == 1
    seen = []
    for layer in stream.layers:
        layer.register_forward_pre_hook(lambda *_: seen.append(here(model)))
    for _ in range(2):
        ours = learned(model)
        assert ours[0] == loss
        assert all(torch.equal(ours[1][name], gradient) for name, gradient in gradients.items())
    assert max(seen) <= 2
    assert here(model) == 1
    state = model.state_dict()
    for name, plain in numbers.items():
        assert isinstance(state[name], PackedExperts)
        assert torch.equal(state[name].all_unpacked(), plain)
    stream.close()
    assert here(model) == LAYERS
    assert all(torch.equal(weight.all_unpacked(), numbers[name]) for name, weight in packed_experts(model))
    assert learned(model)[0] == loss


def test_what_comes_over_the_bus_has_few_bits(folders, played_card):
    """The moved bytes of a layer are those of its packed experts and of its other frozen weights, and no table twice."""
    model, _ = adapted(settings(folders["gpt_oss"], "mxfp4"))
    layer = model.get_base_model().model.layers[0]
    frozen = list(frozen_weights(layer))
    packed = sum(weight.packed_bytes for weight in frozen if isinstance(weight, PackedExperts))
    others = sum(weight.nbytes for weight in frozen if not isinstance(weight, PackedExperts))
    size = Weights(frozen, torch.device("cpu")).size
    assert packed > 0
    assert packed + others <= size <= packed + others + layer_stream.ALIGN * 2 * len(frozen)
