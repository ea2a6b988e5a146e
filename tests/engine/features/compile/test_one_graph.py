"""Compiled layers in training answer the same numbers with and without gradients, to the bit."""

from __future__ import annotations

import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch._dynamo.utils import counters
from trl.models.utils import disable_gradient_checkpointing

from engine.features.compile import apply as compiled
from tests.engine.features.compile.test_apply import cache, config  # noqa: F401  what is compiled goes with the test
from tests.engine.features.conftest import built_of, tiny_model

REENTRANT = {"use_reentrant": False}


def adapted(tier=False, **settings):
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 384, "head_dim": 32}
    settings = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", **settings}
    model = get_peft_model(tiny_model(**shape).bfloat16(), LoraConfig(**settings), autocast_adapter_dtype=False)
    if tier:
        model.gradient_checkpointing_enable(REENTRANT)
        model.enable_input_require_grads()
    return model.train()


def trainer_of(model: Any) -> Any:
    return SimpleNamespace(model=model, ref_model=None, training_step=None, writer=None)


def logps(model, ids):
    logits = model(input_ids=ids, use_cache=False).logits.float()
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def reference(model, ids):
    with torch.no_grad(), disable_gradient_checkpointing(model, REENTRANT), model.disable_adapter():
        return logps(model, ids)


@pytest.fixture
def seen(monkeypatch):
    """In place of compiled layers: the layers as they are, and how each was called."""
    calls: list[SimpleNamespace] = []

    def compile_(function, **_):
        def call(layer, hidden, *args, **kwargs):
            out = function(layer, hidden, *args, **kwargs)
            calls.append(
                SimpleNamespace(
                    gradients=torch.is_grad_enabled(), leads=hidden.requires_grad, tier=layer.gradient_checkpointing
                )
            )
            return out

        return call

    monkeypatch.setattr(compiled.torch, "compile", compile_)
    return calls


@pytest.mark.parametrize("tier", [False, "full"])
@pytest.mark.parametrize("reference_first", [False, True])
def test_a_pass_without_gradients_is_called_as_the_one_with_them_and_keeps_nothing(seen, tier, reference_first):
    model, ids = adapted(tier), torch.randint(128, (2, 9))
    done = compiled.apply(config(tier=tier), built_of(trainer_of(model)))
    assert "policy and reference run the same graph" in done.detail
    packed: list[torch.Tensor] = []
    passes = [lambda: logps(model, ids), lambda: reference(model, ids)]
    for run in reversed(passes) if reference_first else passes:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x):
            before = len(packed)
            out = run()
            assert out.requires_grad == (len(packed) > before)
    first, second = seen[:2], seen[2:4]
    assert first == second
    assert [call.leads for call in first] == [True, True]
    assert all(call.gradients and call.tier == bool(tier) for call in first)
    assert all(layer.gradient_checkpointing == bool(tier) for layer in model.get_base_model().model.layers)
    done.undo()
    assert "gradient_checkpointing_disable" not in vars(model.get_base_model())


def test_the_first_layer_shares_the_graph_of_the_others_and_no_number_changes(monkeypatch):
    plain = torch.compile
    model, ids = adapted(), torch.randint(128, (2, 9))

    def step():
        model.zero_grad()
        loss = logps(model, ids).sum()
        loss.backward()
        return loss.item(), [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]

    loss, gradients = step()
    monkeypatch.setattr(compiled.torch, "compile", lambda function, **more: plain(function, backend="eager"))
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    compiled.apply(config(packing=False), built_of(trainer_of(model)))
    ours, found = step()
    assert counters["stats"]["unique_graphs"] - before == 1
    assert ours == loss
    assert len(found) == len(gradients) > 0
    assert all(map(torch.equal, found, gradients))


def test_a_first_layer_that_learns_nothing_is_not_differentiated_for_it(seen):
    model, ids = adapted(layers_to_transform=[1], target_modules=["q_proj", "down_proj"]), torch.randint(128, (2, 9))
    compiled.apply(config(), built_of(trainer_of(model)))
    logps(model, ids).sum().backward()
    assert [call.leads for call in seen] == [False, False]


def test_evaluation_and_sampling_make_no_gradients(seen):
    model, ids = adapted(), torch.randint(128, (2, 9))
    compiled.apply(config(), built_of(trainer_of(model)))
    with torch.no_grad():
        model.eval()
        logps(model, ids)
    assert not any(call.gradients for call in seen)
    with torch.inference_mode():
        model.train()
        assert logps(model, ids).is_inference()


def test_the_receipt_says_why_the_reference_is_another_graph(seen):
    assert (
        "graph of its own: DoraLinearVariant"
        in compiled.apply(config(), built_of(trainer_of(adapted(use_dora=True)))).detail
    )
    plain = compiled.apply(config(), built_of(SimpleNamespace(model=adapted(), training_step=None)))
    assert "reference" not in plain.detail
    stored = SimpleNamespace(**vars(trainer_of(adapted())), precompute_ref_logps=True)
    assert "stored reference was computed by plain layers" in compiled.apply(config(), built_of(stored)).detail


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU with g++")
@pytest.mark.parametrize("tier", [False, "full"])
def test_before_it_learnt_a_policy_is_its_reference_to_the_bit_and_the_reference_stays(tier):
    model, ids = adapted(tier), torch.randint(128, (4, 48))
    with torch.no_grad():
        plain = logps(model, ids)
    compiled.apply(config(tier=tier), built_of(trainer_of(model)))
    policy, graphs = logps(model, ids), counters["stats"]["unique_graphs"]
    before = reference(model, ids)
    assert torch.equal(policy.detach(), before)
    assert counters["stats"]["unique_graphs"] == graphs
    assert (before - plain).abs().max() < 0.05
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        logps(model, ids).sum().backward()
        optimizer.step()
    assert torch.equal(reference(model, ids), before)
    assert (logps(model, ids) - policy).abs().max() > 0.1
