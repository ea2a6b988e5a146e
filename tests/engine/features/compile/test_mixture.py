"""A mixture's layer is one graph although its routers are heard: for the balancing loss, and for the curves of their load."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import output_capturing

from engine.compat.router_outputs import call_with_router_logits, install_graph_hooks
from engine.features.compile import fallback
from engine.features.compile.apply import IN_PIECES, checkpoint_inside, compile_layers
from engine.features.fused_experts.apply import blocks
from engine.features.router_load.apply import _count_choices, _counter
from tests.engine.features.conftest import built_of

IDS = torch.randint(3, 50, (2, 12), generator=torch.Generator().manual_seed(4))


class Trainer:
    def __init__(self, model):
        self.model = model


@pytest.fixture
def model(monkeypatch):
    """Two layers with a balancing loss; compiled for the CPU's own operations, which shows graphs sooner."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **_: real(function, backend="aot_eager"))
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=16, intermediate_size=24, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_hidden_layers=2, vocab_size=50,
        output_router_logits=True, router_aux_loss_coef=0.5,
    )  # fmt: skip
    config._experts_implementation = "batched_mm"
    yield Qwen3MoeForCausalLM(config).train()
    torch._dynamo.reset()


def test_layers_whose_routers_are_heard_are_compiled_in_a_second_run_of_one_process_too(model):
    told = []
    for _ in range(2):
        trainer = Trainer(model)
        trainer.training_step = lambda ids: model(ids, labels=ids).loss.backward()
        switch = fallback.Switch(requested=False)
        undo = compile_layers(list(model.model.layers), {}, switch)
        built = SimpleNamespace(training=trainer, events=None, report=told.append)
        undo_step = fallback.watch_first_step(built, switch, fallback.Compiling(2, "", "the card is faster"))
        trainer.training_step(IDS)
        undo_step()
        undo()
    assert [entry.effective for entry in told] == ["inductor", "inductor"]
    assert "graphs of an earlier run" in told[1].detail


def step(model):
    """Loss, what routers said, gradients, and how often each expert was chosen."""
    model.zero_grad()
    heard = blocks(built_of(Trainer(model)))
    counts = [_counter(block) for block in heard]
    undos = [_count_choices(block, count) for block, count in zip(heard, counts, strict=True)]
    out = model(IDS, labels=IDS)
    out.loss.backward()
    for undo in undos:
        undo()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return [out.loss.detach(), *(each.detach() for each in out.router_logits)], gradients, counts


@pytest.mark.parametrize("checkpointed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_one_graph_serves_all_layers_and_routers_say_what_they_said(model, checkpointed):
    plain, gradients, counts = step(model)
    assert len(plain) == 3
    undo_checkpoints = checkpoint_inside([model])
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    counters.clear()
    undo = compile_layers(list(model.model.layers), {})
    for _ in range(2):
        found, theirs, chosen = step(model)
        torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(theirs, gradients, rtol=1e-4, atol=1e-6)
        assert [each.tolist() for each in chosen] == [each.tolist() for each in counts]
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] <= 2  # the second of other values than the first
    assert gradients["model.layers.0.mlp.gate.weight"].abs().max() > 0
    undo()
    undo_checkpoints()
    model.gradient_checkpointing_disable()
    torch.testing.assert_close(step(model)[0], plain)


@pytest.mark.parametrize("checkpointed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_layers_that_ask_experts_elsewhere_are_compiled_in_pieces_around_them(model, checkpointed):
    """Their checkpoint is around the pieces: within it, as elsewhere, a graph that ends leaves the whole layer uncompiled."""
    plain, gradients, counts = step(model)
    asked = []
    for layer in model.model.layers:
        experts = layer.mlp.experts
        inner = experts.forward

        def forward(*args, inner=inner):
            asked.append(torch.is_grad_enabled())
            assert not torch.compiler.is_compiling()
            return inner(*args)

        experts.forward = torch.compiler.disable(forward)
    undo_checkpoints = checkpoint_inside([model], everywhere=True)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    counters.clear()
    undo = compile_layers(list(model.model.layers), {}, part=IN_PIECES)
    for _ in range(2):
        asked.clear()
        found, theirs, chosen = step(model)
        torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(theirs, gradients, rtol=1e-4, atol=1e-6)
        assert [each.tolist() for each in chosen] == [
            [many * (1 + checkpointed) for many in each.tolist()] for each in counts
        ]
        assert len(asked) == 2 * (1 + checkpointed), "of a checkpointed layer once more in the backward pass"
    assert counters["stats"]["unique_graphs"] >= 2
    undo()
    undo_checkpoints()
    model.gradient_checkpointing_disable()
    torch.testing.assert_close(step(model)[0], plain)


def test_what_is_relied_on_in_transformers(model):
    """The collector's name, and a hook's key and index in its closure."""
    with torch.no_grad():
        said = model(IDS).router_logits
    router = model.model.layers[0].mlp.gate
    before = dict(router._forward_hooks)
    undo = install_graph_hooks(model.model.layers[0])
    assert list(router._forward_hooks) == list(before)
    assert all(router._forward_hooks[number] is not hook for number, hook in before.items())
    with torch.no_grad():
        assert output_capturing._active_collector.get() is None
        torch.testing.assert_close(model(IDS).router_logits, said)
        _, heard = call_with_router_logits(router, torch.zeros(1, 16))
    assert len(heard) == 1
    undo()
    assert dict(router._forward_hooks) == before
