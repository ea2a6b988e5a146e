"""Products that are summed are added to the first of them while they are computed; the numbers stay."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from engine.features.compile import apply as compiled
from engine.features.compile.product_sums import ADD_PRODUCT, ProductSums
from tests.engine.features.conftest import built_of

TOKENS, HIDDEN, WIDE, RANK = 12, 32, 96, 4


def projections(x, gate, up, down, a, b, c, d):
    """A gated block with adapters on gate and down."""
    inside = F.linear(x, gate) + F.linear(F.linear(x, a), b)
    product = F.silu(inside) * F.linear(x, up)
    return F.linear(product, down) + F.linear(F.linear(product, c), d)


def operands(dtype=torch.float64, device="cpu", scale=1):
    generator = torch.Generator().manual_seed(0)
    hidden, wide = HIDDEN * scale, WIDE * scale
    shapes = ((2, TOKENS * scale, hidden), (wide, hidden), (wide, hidden), (hidden, wide), (RANK, hidden), (wide, RANK),
              (RANK, wide), (hidden, RANK))  # fmt: skip
    return [torch.randn(shape, generator=generator, dtype=torch.float64).mul(0.1).to(device, dtype) for shape in shapes]


def graph_of(function, inputs):
    return make_fx(function, tracing_mode="fake")(*inputs)


def count(graph, op):
    return sum(node.target is op for node in graph.graph.nodes)


def changed(function, inputs):
    graph, sums = graph_of(function, inputs), ProductSums()
    sums(graph.graph)
    graph.recompile()
    assert sums.sums == count(graph, ADD_PRODUCT)
    return graph, sums.sums


def test_low_rank_products_are_added_to_those_of_the_base():
    inputs = operands()
    graph, sums = changed(projections, inputs)
    assert sums == 2
    assert count(graph, torch.ops.aten.add.Tensor) == 0
    torch.testing.assert_close(graph(*inputs), projections(*inputs), rtol=1e-12, atol=1e-14)


def test_the_backward_pass_is_served_too():
    inputs = operands()

    def gradients(*given):
        leaves = [each.detach().requires_grad_() for each in given]
        return torch.autograd.grad(projections(*leaves).square().sum(), leaves)

    graph, sums = changed(gradients, inputs)
    # Both sums forward; the block's gradient from down and its adapter; the input's from up, gate and gate's adapter.
    assert sums == 5
    for found, wanted in zip(graph(*inputs), gradients(*inputs), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_a_chain_of_sums_begins_with_the_widest_product_of_the_first():
    x, *weights = (each.double() for each in (torch.randn(2, 6, 32), *(torch.randn(32, 32) for _ in range(3))))
    thin = [torch.randn(32, 4, dtype=torch.float64), torch.randn(4, 32, dtype=torch.float64)]

    def function(x, a, b, c, d, e):
        return (x @ d) @ e + x @ a + x @ b + (x @ c)

    inputs = [x, *weights, *thin]
    graph, sums = changed(function, inputs)
    assert sums == 3
    (total,) = {node.args[0] for node in graph.graph.nodes if node.target is ADD_PRODUCT}
    assert total.args[0].meta["val"].shape[-1] == 32
    torch.testing.assert_close(graph(*inputs), function(*inputs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, gate, up, down, a, b, *_: F.linear(x, gate) + F.linear(F.linear(x, a), b) * 2,
        lambda x, gate, *_: (p := F.linear(x, gate)) + p,
        lambda x, gate, up, down, a, b, *_: (t := F.linear(x, gate)).sum() + (t + F.linear(F.linear(x, a), b)),
        lambda x, gate, up, down, a, *_: F.linear(x, gate)[..., :4] + F.linear(x, a),
        lambda x, gate, up, *_: torch.add(F.linear(x, gate), F.linear(x, up), alpha=2),
        lambda x, gate, up, down, a, b, *_: F.linear(x, gate).float() + F.linear(x, up),
    ],
    ids=[
        "a scaled one",
        "one with itself",
        "one that is read elsewhere",
        "a part of one",
        "a weighted sum",
        "two formats",
    ],
)
def test_other_sums_are_left_alone(function):
    inputs = operands()
    graph, sums = changed(function, inputs)
    assert sums == 0
    torch.testing.assert_close(graph(*inputs), function(*inputs), rtol=1e-12, atol=1e-14)


def test_lengths_that_are_the_graphs_own_numbers_stay_so():
    inputs = operands()
    graph = make_fx(projections, tracing_mode="symbolic")(*inputs)
    ProductSums()(graph.graph)
    graph.recompile()
    longer = [torch.cat([inputs[0]] * 3, 1), *inputs[1:]]
    torch.testing.assert_close(graph(*longer), projections(*longer), rtol=1e-12, atol=1e-14)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU with g++")
def test_a_compiled_block_that_is_computed_again_copies_no_wide_result(tmp_path, monkeypatch):
    from torch.utils.checkpoint import checkpoint

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def run(options):
        torch._dynamo.reset()
        inputs = [each.requires_grad_() for each in operands(torch.float32)]
        block = torch.compile(lambda *given: checkpoint(projections, *given, use_reentrant=False), options=options)
        for _ in range(2):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
                found = torch.autograd.grad(block(*inputs).square().sum(), inputs)
        return {each.key: each.count for each in seen.key_averages()}, found

    (ops, wanted), (ours, found) = run(None), run({"post_grad_custom_post_pass": ProductSums()})
    assert ours["aten::addmm_"] >= 5
    assert ours.get("aten::copy_", 0) <= ops.get("aten::copy_", 0)
    for each, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_compiled_block_that_is_computed_again_takes_less_of_the_card():
    from torch.utils.checkpoint import checkpoint

    def peak(options):
        torch._dynamo.reset()
        inputs = [each.requires_grad_() for each in operands(torch.bfloat16, "cuda", 32)]
        block = torch.compile(lambda *given: checkpoint(projections, *given, use_reentrant=False), options=options)
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            found = torch.autograd.grad(block(*inputs).float().square().sum(), inputs)
        return torch.cuda.max_memory_allocated() - held, found

    (plain, wanted), (ours, found) = peak(None), peak({"post_grad_custom_post_pass": ProductSums()})
    assert ours < plain
    for each, other in zip(found, wanted, strict=True):
        assert (each - other).float().norm() <= 0.02 * other.float().norm()


def test_every_compiled_layer_has_it(monkeypatch):
    from tests.engine.features.compile.test_apply import Small, Stepping, config

    seen = []
    monkeypatch.setattr(compiled.torch, "compile", lambda function, options, **_: seen.append(options) or function)
    for tier in (True, "medium", False):
        compiled.apply(config(tier=tier), built_of(Stepping(Small())))
    # Each is compiled in two forms: as it is, and with its routers recorded.
    assert [type(options["post_grad_custom_post_pass"]) for options in seen] == [ProductSums] * 6
