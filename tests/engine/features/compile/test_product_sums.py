"""A wide sum of a thick and a low-rank product becomes one product that begins from the other; the numbers stay."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from engine.features.compile import apply as compiled
from engine.features.compile.product_sums import ADD_PRODUCT, LowRankSums
from tests.engine.features.conftest import built_of

TOKENS, HIDDEN, WIDE, RANK = 12, 32, 96, 4


def projections(x, gate, up, down, a, b, c, d):
    """A gated block with adapters on gate and down: one wide sum and one narrow one."""
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


def test_the_wide_sum_is_one_product_and_the_narrow_one_stays():
    inputs = operands()
    graph, sums = graph_of(projections, inputs), LowRankSums()
    sums(graph.graph)
    graph.recompile()
    assert sums.sums == count(graph, ADD_PRODUCT) == 1
    assert count(graph, torch.ops.aten.add.Tensor) == 1
    torch.testing.assert_close(graph(*inputs), projections(*inputs), rtol=1e-12, atol=1e-14)


def test_the_backward_pass_is_served_too():
    inputs = operands()

    def gradients(*given):
        leaves = [each.detach().requires_grad_() for each in given]
        return torch.autograd.grad(projections(*leaves).square().sum(), leaves)

    graph, sums = graph_of(gradients, inputs), LowRankSums()
    sums(graph.graph)
    graph.recompile()
    assert sums.sums >= 1  # the gradient of the product, from down and from its adapter
    for found, wanted in zip(graph(*inputs), gradients(*inputs), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, gate, up, *_: F.linear(x, gate) + F.linear(x, up),
        lambda x, gate, up, down, a, b, *_: F.linear(x, gate) + F.linear(F.linear(x, a), b) * 2,
        lambda x, gate, *_: (p := F.linear(x, gate)) + p,
        lambda x, gate, up, down, a, b, *_: (t := F.linear(F.linear(x, a), b)) + F.linear(x, gate) + t,
    ],
    ids=["two thick products", "a scaled one", "one with itself", "a thin one read twice"],
)
def test_other_sums_are_left_alone(function):
    inputs = operands()
    graph, sums = graph_of(function, inputs), LowRankSums()
    sums(graph.graph)
    graph.recompile()
    assert sums.sums == 0
    torch.testing.assert_close(graph(*inputs), function(*inputs), rtol=1e-12, atol=1e-14)


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

    (ops, wanted), (ours, found) = run(None), run({"post_grad_custom_post_pass": LowRankSums()})
    assert ours["workbench::add_product_"] >= 2  # forward, once more in the backward pass, and there for a gradient
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

    (plain, wanted), (ours, found) = peak(None), peak({"post_grad_custom_post_pass": LowRankSums()})
    assert ours < plain
    for each, other in zip(found, wanted, strict=True):
        assert (each - other).float().norm() <= 0.02 * other.float().norm()


def test_it_is_taken_where_layers_are_computed_again_whole(monkeypatch):
    from tests.engine.features.compile.test_apply import Small, Stepping, config

    seen = []
    monkeypatch.setattr(compiled.torch, "compile", lambda function, options, **_: seen.append(options) or function)
    for tier in (True, "full", "medium", False):
        compiled.apply(config(tier=tier), built_of(Stepping(Small())))
    # Each is compiled in two forms: as it is, and with its routers recorded.
    assert [bool(options) for options in seen] == [True, True, True, True, False, False, False, False]
