"""Images and windows in one call of attention: what a tower sees and learns stays the same, and the calls are few."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from engine.features.built import Built
from engine.features.vision_attention.apply import Regions, apply, regions_attention_forward
from tests.engine.seeing import FAMILIES

GRIDS = {
    "one shape": [[1, 8, 12], [1, 8, 12]],
    "many shapes": [[1, 6, 10], [1, 4, 4], [1, 10, 6]],
    "one image": [[1, 6, 6]],
}
TOWERS = "qwen2_5_vl", "qwen3_vl", "glm4v"


@pytest.fixture(params=TOWERS)
def model(request, tmp_path, shared_data):
    from transformers import AutoModelForImageTextToText

    folder = FAMILIES[request.param](shared_data / "tokenizers/minimind", tmp_path / request.param)
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64)


def seen(model, grids):
    """What the tower says of random patches, and the gradients of all its weights."""
    torch.manual_seed(1)
    grid = torch.tensor(grids)
    tower = model.model.visual
    patches = torch.randn(int(grid.prod(-1).sum()), tower.patch_embed.proj.weight[0].numel(), dtype=torch.float64)
    model.zero_grad()
    out = tower(patches, grid_thw=grid).pooler_output
    (out**2).mean().backward()
    return out.detach(), [weight.grad.clone() for weight in tower.parameters() if weight.grad is not None]


def calls(model, grids, monkeypatch):
    """How often torch's fused attention is called in one look."""
    counted, fused = [], torch.nn.functional.scaled_dot_product_attention

    def counting(*args, **kwargs):
        counted.append(args[0].shape)
        return fused(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(torch.nn.functional, "scaled_dot_product_attention", counting)
        patched.setattr("engine.features.vision_attention.apply.scaled_dot_product_attention", counting)
        seen(model, grids)
    return len(counted)


@pytest.mark.parametrize("grids", GRIDS.values(), ids=GRIDS)
def test_a_tower_sees_and_learns_the_same(model, grids):
    before, gradients = seen(model, grids)
    applied = apply(None, Built(model))
    assert applied is not None
    assert applied.effective == "together"
    after, same = seen(model, grids)
    torch.testing.assert_close(after, before, rtol=1e-9, atol=1e-12)
    assert len(gradients) == len(same) > 10
    for one, other in zip(gradients, same, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-7, atol=1e-12)


def test_windows_are_taken_together_and_one_by_one_again_after_the_undo(tmp_path, shared_data, monkeypatch):
    from transformers import AutoModelForImageTextToText

    folder = FAMILIES["qwen2_5_vl"](shared_data / "tokenizers/minimind", tmp_path / "model")
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64)
    grids = GRIDS["one shape"]
    alone = calls(model, grids, monkeypatch)
    applied = apply(None, Built(model))
    assert applied is not None
    assert applied.count == 2
    # A layer of windows of one size each, and a layer of whole images.
    assert calls(model, grids, monkeypatch) == 2 < alone
    assert model.config.vision_config._attn_implementation == "sdpa"
    applied.undo()
    assert calls(model, grids, monkeypatch) == alone
    assert not any("forward" in vars(each) for each in model.modules())


def test_models_without_such_a_tower_are_left_alone(tmp_path, shared_data):
    from transformers import AutoModelForImageTextToText

    folder = FAMILIES["gemma3"](shared_data / "tokenizers/minimind", tmp_path / "model")
    assert apply(None, Built(AutoModelForImageTextToText.from_pretrained(folder))) is None
    eager = FAMILIES["qwen2_5_vl"](shared_data / "tokenizers/minimind", tmp_path / "eager")
    assert apply(None, Built(AutoModelForImageTextToText.from_pretrained(eager, attn_implementation="eager"))) is None


@pytest.mark.parametrize("lengths", [(3, 3, 3), (4, 1, 4, 7), (5,), (2, 0, 6)])
def test_each_region_sees_itself_alone(lengths):
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    query, key, value = torch.randn(3, 1, 2, int(bounds[-1]), 4, dtype=torch.float64).unbind(0)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = owner[:, None] == owner[None]
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3)
    found, _ = regions_attention_forward(
        SimpleNamespace(), query, key, value, None, scaling=0.3, regions=Regions.of(bounds)
    )
    torch.testing.assert_close(found, expected.transpose(1, 2))
