"""A packed layer keeps its numbers under casts, holds none wide for backward, and is compiled as one graph."""

from __future__ import annotations

import torch

from engine.features.load import load_model
from engine.models.sizes import format_of, weights_in
from tests.engine.models.stored_packed.packed_files import packed_folders
from tests.engine.models.test_stored_fp8 import config
from tests.engine.trainers.conftest import CONVERSATIONS, lines, resumed_from, source, train  # noqa: F401


def test_weights_in_other_formats_stay_as_they_are_when_the_model_is_cast(plain, tmp_path):
    packed, _ = packed_folders(plain, tmp_path, "gptq", ordered=True)
    model = load_model(config(packed))
    layer = model.model.layers[0].mlp.up_proj
    before = layer.wide(torch.float32)
    model.to(torch.bfloat16).half()
    assert (format_of(layer.weight), weights_in(layer.weight)) == ("uint4", 64 * 128)
    assert (layer.weight.dtype, layer.weight_scale.dtype) == (torch.uint8, torch.float16)
    assert torch.equal(layer.wide(torch.float32), before)
    assert layer.packed_bytes < 0.9 * layer.in_features * layer.out_features
    x = torch.randn(3, 64, dtype=torch.bfloat16, requires_grad=True)
    out = layer(x)
    assert max(each.numel() for each in out.grad_fn.saved_tensors if each is not None) <= layer.weight.numel()
    out.sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 128, dtype=torch.bfloat16) @ layer.wide(torch.bfloat16))


def test_compiled_layers_give_what_plain_ones_give(plain, tmp_path):
    packed, _ = packed_folders(plain, tmp_path, "gptq", ordered=True)
    layer = load_model(config(packed)).model.layers[1].mlp.down_proj
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    found = []
    for each in (layer, compiled):
        x = torch.randn(5, 128, generator=torch.Generator().manual_seed(3)).requires_grad_()
        out = each(x)
        out.square().sum().backward()
        found.append((out.detach(), x.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)
