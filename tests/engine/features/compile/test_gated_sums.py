"""Gated blocks add their adapters' products where gate and up are multiplied: the numbers are PEFT's, and no wide sum is written."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from engine.features.compile import gated_sums as feature
from engine.features.compile.gate import Gate
from engine.features.compile.gated_sums import ComputeProductsAgain, GatedSums, Passes, group_blocks
from engine.features.compile.product_sums import ProductSums
from engine.kernels.gated_sums import GRADIENTS, GRADIENTS_IN_PLACE, gated_sums
from tests.engine.features.compile.test_grouped import adapted, step

TOKENS, HIDDEN, WIDE, RANK = 12, 32, 96, 4
BASE = 1, 2, 3
"""Where the operands' frozen weights stand."""


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


def test_a_shut_gate_leaves_the_base_alone(everywhere):
    model, ids = adapted(), torch.randint(128, (2, 9))
    gate = Gate(torch.device("cpu"))
    with model.disable_adapter(), torch.no_grad():
        off = model(ids).logits
    _, blocks, undo = group_blocks(list(model.get_base_model().model.layers), gate)
    with gate.shut(), torch.no_grad():
        shut = model(ids).logits
    with torch.no_grad():
        assert not torch.equal(model(ids).logits, off)
    undo()
    assert blocks == 2
    torch.testing.assert_close(shut, off, rtol=1e-12, atol=1e-14)


def test_without_kernels_blocks_keep_their_code():
    _, blocks, undo = group_blocks(list(adapted().get_base_model().model.layers))
    undo()
    assert blocks == 0


def block(x, gate, up, down, a, b, c, d, e, f):
    """A gated block with adapters on all three projections."""
    product, answer = gated_sums(
        F.linear(x, gate), (F.linear(x, a), b), F.linear(x, up), (F.linear(x, e), f), down=(c, d)
    )
    return F.linear(product, down) + answer


def plain(x, gate, up, down, a, b, c, d, e, f):
    """The same without the operation."""
    product = F.silu(F.linear(x, gate) + F.linear(F.linear(x, a), b)) * (F.linear(x, up) + F.linear(F.linear(x, e), f))
    return F.linear(product, down) + F.linear(F.linear(product, c), d)


def operands(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, TOKENS, HIDDEN), (WIDE, HIDDEN), (WIDE, HIDDEN), (HIDDEN, WIDE), (RANK, HIDDEN), (WIDE, RANK),
              (RANK, WIDE), (HIDDEN, RANK), (RANK, HIDDEN), (WIDE, RANK))  # fmt: skip
    return [torch.randn(shape, generator=generator, dtype=torch.float64).mul(0.1).to(dtype) for shape in shapes]


def count(graph, op):
    return sum(node.target is op for node in graph.graph.nodes)


def test_lengths_stay_the_graphs_own():
    """A length that became a constant would have each layer compiled again for each length of a batch."""
    shapes = ShapeEnv()
    fake, of_any_length = FakeTensorMode(shape_env=shapes), StatelessSymbolicContext(
        dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.DYNAMIC, DimDynamic.STATIC]
    )  # fmt: skip
    x, *weights = operands()
    given = [fake.from_tensor(x, symbolic_context=of_any_length), *map(fake.from_tensor, weights)]
    slope = fake.from_tensor(torch.randn(2, TOKENS, HIDDEN), symbolic_context=of_any_length).double()

    def gradients(slope, *given):
        leaves = [each.detach().requires_grad_(at not in BASE) for at, each in enumerate(given)]
        return torch.autograd.grad(block(*leaves), [each for each in leaves if each.requires_grad], slope)

    with fake:
        graph = make_fx(gradients)(slope, *given)
    GatedSums()(graph.graph)
    assert {int(value) for value in shapes.replacements.values() if value.is_number} <= {HIDDEN}


@pytest.mark.parametrize("read", [False, True], ids=["theirs alone", "read once more"])
def test_the_backward_pass_writes_over_what_nothing_else_reads(read):
    inputs = operands()
    slope = torch.randn(2, TOKENS, HIDDEN, dtype=torch.float64)

    def gradients(slope, *given, of=block):
        leaves = [each.detach().requires_grad_(at not in BASE) for at, each in enumerate(given)]
        return torch.autograd.grad(of(*leaves), [each for each in leaves if each.requires_grad], slope)

    graph, made = make_fx(gradients, tracing_mode="fake")(slope, *inputs), GatedSums()
    graph.graph.eliminate_dead_code()  # the forward pass, of which nothing is asked
    if read:
        (node,) = (node for node in graph.graph.nodes if node.target is GRADIENTS)
        (output,) = (each for each in graph.graph.nodes if each.op == "output")
        output.args = ([*output.args[0], node.args[3]],)
    made(graph.graph)
    graph.graph.lint()
    graph.recompile()
    assert (count(graph, GRADIENTS), count(graph, GRADIENTS_IN_PLACE)) == ((1, 0) if read else (0, 1))
    assert made.in_place == (not read)
    # Of results as wide as the block there is no sum.
    sums = [node for node in graph.graph.nodes if node.target is torch.ops.aten.add.Tensor]
    assert all(node.meta["val"].shape[-1] == HIDDEN for node in sums)
    *found, gate = graph(slope, *inputs) if read else (*graph(slope, *inputs), F.linear(*inputs[:2]))
    torch.testing.assert_close(gate, F.linear(*inputs[:2]))
    for each, wanted in zip(found, gradients(slope, *inputs, of=plain), strict=True):
        torch.testing.assert_close(each, wanted, rtol=1e-10, atol=1e-12)


def test_one_graph_serves_batches_of_every_length():
    """Padded batches have as many lengths as a run has steps; a graph of one of them was compiled anew in each."""
    compiled = torch.compile(block, backend="aot_eager", dynamic=True, fullgraph=True)
    x, *rest = operands()
    leaves = [each.requires_grad_(at + 1 not in BASE) for at, each in enumerate(rest)]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (TOKENS, 9, 7, 4):
            part = x[:, :tokens].clone().requires_grad_()
            found = torch.autograd.grad(compiled(part, *leaves).square().sum(), part)
            expected = torch.autograd.grad(plain(part, *leaves).square().sum(), part)
            torch.testing.assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU with g++")
@pytest.mark.parametrize("again", [True, False], ids=["computed again", "held"])
def test_a_compiled_block_holds_no_product_and_computes_it_once_more(again, tmp_path, monkeypatch):
    from torch.utils.checkpoint import checkpoint

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    inputs = [each.requires_grad_(at not in BASE) for at, each in enumerate(operands(torch.float32))]
    trained = [each for each in inputs if each.requires_grad]
    wanted = torch.autograd.grad(plain(*inputs).square().sum(), trained)
    run = (lambda *given: checkpoint(block, *given, use_reentrant=False)) if again else block
    after = GatedSums()
    options = {
        "post_grad_custom_post_pass": Passes([after, ProductSums()]), "joint_custom_pre_pass": ComputeProductsAgain()
    }  # fmt: skip
    # Rows of many lengths are compiled for any, packs for their own.
    compiled = torch.compile(run, options=options, dynamic=again or None)
    for _ in range(2):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            found = torch.autograd.grad(compiled(*inputs).square().sum(), trained)
    ops = {each.key: each.count for each in seen.key_averages() if each.key.startswith("workbench::")}
    one = "workbench::gated_sums_backward_" if again else "workbench::gated_sums_backward"
    assert ops == {"workbench::gated_sums": 1, one: 1}
    for each, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-4, atol=1e-5)
    if again:
        x = inputs[0].detach()[:, :7].clone().requires_grad_()
        with torch._dynamo.config.patch(error_on_recompile=True):  # shorter rows, the same graphs
            (found,) = torch.autograd.grad(compiled(x, *inputs[1:]).square().sum(), x)
        (wanted,) = torch.autograd.grad(plain(x, *inputs[1:]).square().sum(), x)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()
