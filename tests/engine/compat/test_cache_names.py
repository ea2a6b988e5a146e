"""The cache reaches backbones, layers, attention and masks under the name that is read off the installed transformers."""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM, masking_utils

from engine.compat.cache_names import CACHE, NAMES, cache_in
from tests.engine.features.conftest import tiny_model


def mamba() -> MambaForCausalLM:
    return MambaForCausalLM(
        MambaConfig(vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=2, pad_token_id=0, eos_token_id=None)
    )


@pytest.mark.parametrize(("made", "inner"), [(tiny_model, "self_attn"), (mamba, "mixer")])
def test_a_cache_is_found_wherever_sampling_passes_it_on(made, inner):
    model = made().eval()
    backbone = model.base_model
    found: dict[str, list[tuple[list[str], bool]]] = {"backbone": [], "layer": [], "inner": []}

    def look(place):
        def hook(module, args, kwargs):
            found[place].append(([name for name in NAMES if name in kwargs], cache_in(kwargs) is not None))

        return hook

    layer = backbone.layers[1]
    for place, module in (("backbone", backbone), ("layer", layer), ("inner", getattr(layer, inner))):
        module.register_forward_pre_hook(look(place), with_kwargs=True)
    model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False)
    for place, calls in found.items():
        assert len(calls) == 3, place
        assert calls[-1][1], place
        if made is tiny_model:
            assert calls[-1][0] == [CACHE], place


def test_masks_take_the_cache_under_the_same_name():
    for name in ("create_causal_mask", "create_sliding_window_causal_mask"):
        assert CACHE in inspect.signature(getattr(masking_utils, name)).parameters


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_is_read_under_every_name(name):
    cache = object()
    assert cache_in({**dict.fromkeys(NAMES), name: cache, "use_cache": True}) is cache
    assert cache_in({name: None}) is None
