"""Models that see keep every gradient under fused rotation, where positions of images differ in their three axes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers

from engine.features.fused_norm_rope import apply as fused_norm_rope
from tests.engine.features.conftest import built_of

TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "vocab_size": 80, "max_position_embeddings": 128, "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]},
}  # fmt: skip
SIGHT = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
WIDER = {**SIGHT, "intermediate_size": 32, "out_hidden_size": 32}
MODELS = {
    "Qwen2VL": {**SIGHT, "embed_dim": 32, "mlp_ratio": 2},
    "Qwen2_5_VL": {**WIDER, "window_size": 16, "fullatt_block_indexes": [0]},
    "Qwen3VL": {**WIDER, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
}
IMAGE, BEGIN, END = 70, 72, 73
GRID = torch.tensor([[1, 4, 4], [1, 4, 8]])
"""Patches of the two images, of which four make one token."""


def seeing(name):
    torch.manual_seed(0)
    told = getattr(transformers, f"{name}Config")(
        text_config=TEXT, vision_config=MODELS[name], image_token_id=IMAGE, video_token_id=71, vision_start_token_id=BEGIN,
        vision_end_token_id=END,
    )  # fmt: skip
    return getattr(transformers, f"{name}ForConditionalGeneration")(told).train()


def rows(model):
    """Two rows with an image each, one of them padded, and the same two as documents of one packed row."""
    ids = torch.randint(3, 60, (2, 20))
    for row, (start, tokens) in zip(ids, ((3, 4), (6, 8)), strict=True):
        row[start], row[start + 1 : start + 1 + tokens], row[start + 1 + tokens] = BEGIN, IMAGE, END
    mask, kinds = torch.ones_like(ids), (ids == IMAGE).int()
    mask[1, :3] = 0
    pixels = torch.randn(int(GRID.prod(-1).sum()), 3 * 2 * 4 * 4)
    shared = {"pixel_values": pixels, "image_grid_thw": GRID}
    axes, _ = model.model.get_rope_index(
        ids, image_grid_thw=GRID, attention_mask=torch.ones_like(ids), mm_token_type_ids=kinds
    )
    assert (axes[0] != axes[1]).any()
    assert (axes[1] != axes[2]).any()
    text = torch.arange(20).expand(1, 2, -1)
    packed = torch.cat([text, axes]).flatten(1).unsqueeze(1)
    flat = {"input_ids": ids.view(1, -1), "labels": ids.view(1, -1), "mm_token_type_ids": kinds.view(1, -1)}
    yield {"input_ids": ids, "labels": ids, "attention_mask": mask, "mm_token_type_ids": kinds, **shared}
    yield {**flat, "position_ids": packed, "attention_mask": None, **shared}


def step(model, batch):
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_rows_with_images_and_packed_ones_keep_loss_and_gradients(name):
    model = seeing(name)
    batches = list(rows(model))
    theirs = [step(model, batch) for batch in batches]
    layers = fused_norm_rope.attention_layers(built_of(SimpleNamespace(model=model)))
    assert len(layers) == TEXT["num_hidden_layers"]
    undo = fused_norm_rope.fuse(layers)
    for batch, (loss, gradients) in zip(batches, theirs, strict=True):
        ours, found = step(model, batch)
        assert ours == pytest.approx(loss, rel=1e-6)
        assert found.keys() == gradients.keys()
        assert any("visual" in each for each in found)
        for each, gradient in gradients.items():
            torch.testing.assert_close(found[each], gradient, rtol=1e-4, atol=1e-6)
        # The axes matter: positions of text alone give another loss.
        plain = torch.arange(batch["input_ids"].shape[1]).expand(3, len(batch["input_ids"]), -1)
        assert abs(step(model, {**batch, "position_ids": plain})[0] - loss) > 1e-5
    undo()
    assert all("forward" not in vars(layer) for layer in layers)
