"""Gated blocks add their adapters' products where gate and up are multiplied: the numbers are PEFT's, and no wide sum is written."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from engine.features.compile import gated_sums as feature
from engine.features.compile.gated_sums import ComputeProductsAgain, GatedSums, Passes, group_blocks
from engine.features.compile.low_rank_sums import LowRankSums
from engine.kernels.gated_sums import GATED_SUMS, GRADIENTS, GRADIENTS_IN_PLACE, gated_sums
from tests.engine.features.compile.test_grouped import adapted, step

TOKENS, HIDDEN, WIDE, RANK = 12, 32, 96, 4


@pytest.fixture
def everywhere(monkeypatch):
    """Blocks are served on a CPU too, by the reference."""
    monkeypatch.setattr(feature, "kernel_serves", lambda *weights: True)


@pytest.mark.parametrize("targets", ["all-linear", ["gate_proj", "up_proj"], ["q_proj", "up_proj"]])
def test_outputs_and_gradients_are_pefts(everywhere, targets):
    model, ids = adapted(target_modules=targets), torch.randint(128, (2, 9))
    logits, gradients = step(model, ids)
    with model.disable_adapter(), torch.no_grad():
        off = model(ids).logits
    count, blocks, undo = group_blocks(list(model.get_base_model().model.layers))
    assert count == 4 if targets == "all-linear" else count >= 2
    assert blocks == (0 if "q_proj" in targets else 2)
    ours, found = step(model, ids)
    torch.testing.assert_close(ours, logits, rtol=1e-11, atol=1e-13)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-13)
    with model.disable_adapter(), torch.no_grad():
        assert torch.equal(model(ids).logits, off)
    undo()
    assert torch.equal(step(model, ids)[0], logits)


def test_without_kernels_blocks_keep_their_code():
    _, blocks, undo = group_blocks(list(adapted().get_base_model().model.layers))
    undo()
    assert blocks == 0


def block(x, gate, up, down, a, b, c, d, e, f):
    """A gated block with adapters on all three projections."""
    product = gated_sums(F.linear(x, gate), (F.linear(x, a), b), F.linear(x, up), (F.linear(x, e), f))
    return F.linear(product, down) + F.linear(F.linear(product, c), d)


def operands(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, TOKENS, HIDDEN), (WIDE, HIDDEN), (WIDE, HIDDEN), (HIDDEN, WIDE), (RANK, HIDDEN), (WIDE, RANK),
              (RANK, WIDE), (HIDDEN, RANK), (RANK, HIDDEN), (WIDE, RANK))  # fmt: skip
    return [torch.randn(shape, generator=generator, dtype=torch.float64).mul(0.1).to(dtype) for shape in shapes]


def count(graph, op):
    return sum(node.target is op for node in graph.graph.nodes)


@pytest.mark.parametrize("held", [False, True], ids=["computed again", "gate held"])
def test_the_backward_pass_takes_one_launch_and_no_wide_sum(held):
    inputs = operands()
    slope = torch.randn(2, TOKENS, HIDDEN, dtype=torch.float64)

    def gradients(slope, *given):
        leaves = [each.detach().requires_grad_() for each in given]
        if not held:
            return torch.autograd.grad(block(*leaves), leaves, slope)
        x, gate = leaves[:2]
        wide = F.linear(x, gate)
        product = gated_sums(wide, None, F.linear(x, leaves[2]), None)
        return *torch.autograd.grad(F.linear(product, leaves[3]), leaves[:4], slope), wide

    graph, made = make_fx(gradients, tracing_mode="fake")(slope, *inputs), GatedSums()
    made(graph.graph)
    graph.graph.lint()
    graph.recompile()
    assert count(graph, GATED_SUMS) == 0
    assert (count(graph, GRADIENTS), count(graph, GRADIENTS_IN_PLACE)) == ((1, 0) if held else (0, 1))
    assert (made.thin, made.in_place, made.products) == ((0, 0, 1) if held else (1, 1, 0))
    # Only sums of the input's own width are left.
    sums = [node for node in graph.graph.nodes if node.target is torch.ops.aten.add.Tensor]
    assert all(node.meta["val"].shape[-1] == HIDDEN for node in sums)
    for found, wanted in zip(graph(slope, *inputs), gradients(slope, *inputs), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_a_product_that_its_own_gradient_waits_for_stays():
    inputs = operands()

    def gradients(*given):
        leaves = [each.detach().requires_grad_() for each in given]
        return torch.autograd.grad(block(*leaves).square().sum(), leaves)

    graph, made = make_fx(gradients, tracing_mode="fake")(*inputs), GatedSums()
    made(graph.graph)
    graph.recompile()
    assert (count(graph, GATED_SUMS), count(graph, GRADIENTS), made.thin) == (1, 1, 1)
    for found, wanted in zip(graph(*inputs), gradients(*inputs), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU with g++")
@pytest.mark.parametrize("again", [True, False], ids=["computed again", "held"])
def test_a_compiled_block_holds_no_product_and_computes_it_once_more(again, tmp_path, monkeypatch):
    from torch.utils.checkpoint import checkpoint

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    inputs = [each.requires_grad_() for each in operands(torch.float32)]
    wanted = torch.autograd.grad(block(*inputs).square().sum(), inputs)
    run = (lambda *given: checkpoint(block, *given, use_reentrant=False)) if again else block
    after = GatedSums()
    options = {
        "post_grad_custom_post_pass": Passes([after, LowRankSums()]), "joint_custom_pre_pass": ComputeProductsAgain()
    }  # fmt: skip
    compiled = torch.compile(run, options=options)
    for _ in range(2):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            found = torch.autograd.grad(compiled(*inputs).square().sum(), inputs)
    ops = {each.key: each.count for each in seen.key_averages() if each.key.startswith("workbench::")}
    one = "workbench::gated_sums_backward_" if again else "workbench::gated_sums_backward"
    assert ops == {"workbench::gated_sums": 1, one: 1}
    for each, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()
