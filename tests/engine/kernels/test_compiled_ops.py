"""Every op stays one graph under `torch.compile(fullgraph=True)`, and under autocast, with the numbers of the eager one."""

from __future__ import annotations

import pytest
import sympy
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from engine.kernels.experts import ExpertLoRA, Gate, expert_mlp
from engine.kernels.gated import gated
from engine.kernels.linear_cross_entropy import linear_cross_entropy
from engine.kernels.linear_logp import linear_logp
from engine.kernels.logp_entropy import logp_entropy
from engine.kernels.norm_rope import norm_rope
from engine.kernels.rope import rope


def leaves(*tensors):
    return [x.detach().clone().requires_grad_(x.requires_grad) for x in tensors]


def compare(op, *inputs, gradients=1e-6):
    """Outputs and gradients of the op in one graph are those without a compiler."""
    torch._dynamo.reset()
    results = []
    for function in (op, torch.compile(op, fullgraph=True, backend="aot_eager")):
        given = leaves(*inputs)
        out = [x for x in function(*given) if x is not None]
        sum((x * (i + 1)).sum() for i, x in enumerate(out)).backward()
        results.append([*out, *(x.grad for x in given if x.grad is not None)])
    assert len(results[0]) >= 2
    for i, (ours, theirs) in enumerate(zip(*results, strict=True)):
        allowed = 1e-6 if i < len(out) else gradients
        torch.testing.assert_close(ours, theirs, rtol=allowed, atol=allowed)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("outputs", [("entropy", "cross_entropy"), ("cross_entropy",)])
def test_scores_from_hidden_states_are_one_node_of_a_graph(trained, outputs):
    targets = torch.tensor([3, -100, 0, 49])

    def op(hidden, weight, bias):
        scores = linear_logp(
            hidden, weight, targets, bias=bias, ignore_index=-100, outputs=outputs, label_smoothing=0.1, soft_cap=3.0
        )
        return scores[5], scores.entropy

    hidden = torch.randn(4, 8, requires_grad=True)
    head = [torch.randn(50, 8, requires_grad=trained), torch.randn(50, requires_grad=trained)]
    compare(op, hidden, *head)


def test_scores_in_a_graph_follow_autocast():
    hidden, weight, targets = torch.randn(4, 8, requires_grad=True), torch.randn(50, 8), torch.tensor([3, 1, 0, 49])

    def op(hidden, weight):
        with torch.autocast("cpu", torch.bfloat16):
            return linear_logp(hidden, weight, targets, outputs=("entropy",))[:2]

    # The graph rounds the gradient of the cast states to bfloat16, as autocast does of any product.
    compare(op, hidden, weight, gradients=torch.finfo(torch.bfloat16).eps)
    found = op(hidden, weight)
    assert not torch.equal(found[0], linear_logp(hidden, weight, targets).log_probs)
    # Products are rounded, sums are not.
    rounded = linear_logp(hidden.bfloat16(), weight.bfloat16(), targets)
    torch.testing.assert_close(found[1], rounded.entropy, rtol=1e-6, atol=1e-6)


def test_the_ops_on_logits_and_heads_are_in_the_graph():
    targets = torch.tensor([[3, -100], [0, 49]])
    compare(lambda x: logp_entropy(x[:, :-1], targets, temperature=0.7), torch.randn(2, 3, 50, requires_grad=True))
    labels = torch.tensor([3, -100, 49])
    compare(
        lambda h, w, b: [linear_cross_entropy(h, w, labels, bias=b, label_smoothing=0.1, z_loss=0.01)],
        *(torch.randn(*shape, requires_grad=True) for shape in ((3, 8), (50, 8), (50,))),
    )
    angles = torch.randn(2, 3, 8)
    compare(
        lambda q, k, a, b: norm_rope(q, k, a, b, angles.cos(), angles.sin(), unit_offset=True),
        *(torch.randn(2, 3, heads, 8, requires_grad=True) for heads in (4, 2)),
        *(torch.rand(8, requires_grad=True) for _ in range(2)),
    )
    compare(
        lambda q, k: rope(q, k, angles.cos(), angles.sin()),
        *(torch.randn(2, 3, heads, 8, requires_grad=True) for heads in (4, 2)),
    )
    compare(
        lambda x: [gated(*x.chunk(2, -1), "gelu_tanh"), gated(x, x, "gelu")], torch.randn(2, 3, 8, requires_grad=True)
    )


def test_experts_are_one_node_of_a_graph():
    ids = torch.tensor([[0, 2], [1, 3], [-1, 0]])
    shapes = (3, 8), (3, 2), (4, 12, 8), (4, 8, 6), (4, 2, 8), (4, 12, 2)

    def op(x, routing, gate_up, down, a, b):
        return [expert_mlp(x, ids, routing, gate_up, down, gate_up_lora=ExpertLoRA(a, b, 0.5), gate=Gate("gelu"))]

    # Plain torch adds the experts up in another order inside a graph.
    compare(op, *(torch.randn(shape, dtype=torch.float64, requires_grad=i != 2) for i, shape in enumerate(shapes)))


def test_no_op_makes_a_batchs_length_a_constant_of_the_graph():
    """Padded batches have as many lengths as a run has steps. A fake form that asks a length for its number (`torch.Size.numel`,
    `int.bit_length`) has the graph compiled anew for each."""
    import engine.kernels.experts.registered
    import engine.kernels.gated_sums
    import engine.kernels.linear_logp.registered
    import engine.kernels.logp_entropy.registered  # noqa: F401

    ops, rows, time = torch.ops.workbench, 91, 13
    x, targets, angles = torch.randn(rows, 10), torch.zeros(rows, dtype=torch.int64), torch.randn(time, 7, 10)
    wide, heads = torch.randn(time, 7, 10), [torch.randn(time, 7, count, 10) for count in (4, 2)]
    thin = [torch.randn(time, 7, 2), torch.randn(10, 2)]
    experts = [
        torch.zeros(rows, 3, dtype=torch.int64),
        torch.randn(rows, 3),
        torch.randn(4, 12, 10),
        torch.randn(4, 10, 6),
    ]
    calls = {
        ops.expert_mlp: ([x, *experts], [*[None] * 6, "silu", False, [0.0, 0.0, 1.0, 1.0]]),
        ops.gated: ([wide, wide], ["silu"]),
        ops.gated_sums: ([wide, *thin, wide, *thin], [None, None, "silu"]),
        ops.rope: ([*heads, angles, angles], [False]),
        ops.norm_rope: ([*heads, torch.rand(10), torch.rand(10), angles, angles], [1e-6, False]),
        ops.linear_logp: (
            [x, torch.randn(50, 10), torch.rand(50), targets],
            [[1.0, 0.0, 1.0, 0.0, 0.0], 1 << 20, "entropy", -100, True],
        ),
        ops.logp_entropy: ([torch.randn(rows, 50), targets], [1.0, True, -100]),
    }  # fmt: skip
    for op, (tensors, settings) in calls.items():
        lengths = ShapeEnv()
        with FakeTensorMode(shape_env=lengths) as mode:
            given = [
                mode.from_tensor(
                    each,
                    symbolic_context=StatelessSymbolicContext(
                        [DimDynamic.DYNAMIC if size in (rows, time) else DimDynamic.STATIC for size in each.shape]
                    ),
                )
                for each in tensors
            ]
            given[0].requires_grad_()
            out = op(*given, *settings)
            (out if isinstance(out, torch.Tensor) else out[0]).sum().backward()
        assert given[0].grad is not None
        equal = [guard.expr for guard in lengths.guards if isinstance(guard.expr, sympy.Eq)]
        held = [each for each in equal if any(side.is_number for side in each.args)]
        assert not held, (op, held)
        assert not [size for size in lengths.replacements.values() if size.is_number], op
