"""A packed layer keeps its numbers under casts, holds none wide for backward, and is compiled as one graph."""

from __future__ import annotations

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

from engine.features.built import decoder_layers
from engine.features.compile.apply import checkpoint_inside
from engine.features.load import load_model
from engine.models.adapters import add_adapter
from engine.models.sizes import format_of, weights_in
from tests.engine.models.stored_packed.packed_files import FORMS, packed_folders
from tests.engine.models.test_stored_fp8 import config, gradients
from tests.engine.trainers.conftest import CONVERSATIONS, lines, resumed_from, source, train  # noqa: F401


def test_weights_in_other_formats_stay_as_they_are_when_the_model_is_cast(plain, tmp_path):
    packed, _ = packed_folders(plain, tmp_path, "gptq", ordered=True)
    model = load_model(config(packed))
    layer = model.model.layers[0].mlp.up_proj
    before = layer.dequantize(torch.float32)
    model.to(torch.bfloat16).half()
    assert (format_of(layer.weight), weights_in(layer.weight)) == ("uint4", 64 * 128)
    assert (layer.weight.dtype, layer.weight_scale.dtype) == (torch.uint8, torch.float16)
    assert torch.equal(layer.dequantize(torch.float32), before)
    assert layer.packed_bytes < 0.9 * layer.in_features * layer.out_features
    x = torch.randn(3, 64, dtype=torch.bfloat16, requires_grad=True)
    out = layer(x)
    assert max(each.numel() for each in out.grad_fn.saved_tensors if each is not None) <= layer.weight.numel()
    out.sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 128, dtype=torch.bfloat16) @ layer.dequantize(torch.bfloat16))


@pytest.mark.parametrize("form", ["gptq-ordered", "awq", "nvfp4"])
def test_compiled_layers_give_what_plain_ones_give_and_unpack_again_in_backward(plain, tmp_path, form):
    kind, told = FORMS[form]
    packed, _ = packed_folders(plain, tmp_path, kind, **told)
    layer = load_model(config(packed)).model.layers[1].mlp.down_proj
    kept = []

    def forward(graph, _):
        (out,) = [node for node in graph.graph.nodes if node.op == "output"]
        kept.extend(node.meta["val"].numel() for node in out.args[0] if node is not None and node.op != "placeholder")
        return make_boxed_func(graph.forward)

    def backward(graph, _):
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=forward, bw_compiler=backward, partition_fn=min_cut_rematerialization_partition)
    torch._dynamo.reset()
    found = []
    for each in (layer, torch.compile(layer, backend=backend, fullgraph=True)):
        x = torch.randn(5, 128, generator=torch.Generator().manual_seed(3)).requires_grad_()
        out = each(x.sin()).sin()  # what is kept of other operations goes over the same border
        out.square().sum().backward()
        found.append((out.detach(), x.grad))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    assert kept
    assert max(kept) < layer.in_features * layer.out_features


def test_a_checkpointed_decoder_layer_of_packed_numbers_and_adapters_is_one_graph(plain, tmp_path):
    packed, _ = packed_folders(plain, tmp_path, "gptq", ordered=True)
    made = config(packed)
    torch.manual_seed(1)
    model = add_adapter(load_model(made), made).train()
    _, plain_gradients = gradients(model)
    base = model.get_base_model()
    base.gradient_checkpointing_enable({"use_reentrant": False})
    undo = checkpoint_inside([base])
    torch._dynamo.reset()
    counters.clear()
    for layer in decoder_layers(base):
        layer.compile(backend="aot_eager", fullgraph=True)
    model.zero_grad()
    _, found = gradients(model)
    undo()
    assert counters["stats"]["unique_graphs"] <= 2  # the first layer's input leads to no weight
    assert not counters["graph_break"]
    assert found.keys() == plain_gradients.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, plain_gradients[name], rtol=1e-4, atol=1e-7)
