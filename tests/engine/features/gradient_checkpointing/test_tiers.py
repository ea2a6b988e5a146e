"""Each tier keeps less than the one before it, changes no gradient, and keeps what the estimate says."""

from __future__ import annotations

import gc

import pytest
import torch
from peft import LoraConfig, get_peft_model

from engine.config.facts import Facts, ModelFacts
from engine.facts.model_shape import model_facts
from engine.features.gradient_checkpointing import tier_width
from engine.features.gradient_checkpointing.tiers import leave_out, tier_of, use_tier
from engine.hardware import GiB, Gpu, Machine
from engine.planning.auto import resolved
from engine.planning.memory_model import memory
from engine.rules import read
from tests.engine.features.conftest import Meter, tiny_model
from tests.engine.trainers.conftest import CONVERSATIONS, PAIRS, lines

TIERS = (False, "selective", "medium", "full")
SHAPE = {"layers": 4, "hidden_size": 64, "intermediate_size": 192, "head_dim": 16}


def kept(tier):
    """Bytes that live between forward and backward, the loss, and the gradients."""
    model = tiny_model(**SHAPE)
    if tier in ("selective", "medium"):
        use_tier(model, tier)
    if tier:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids = torch.arange(2 * 96).reshape(2, 96) % 128
    with Meter() as meter:
        states = model.model(ids).last_hidden_state
        gc.collect()
        live = meter.live
    loss = states.square().mean()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return live, loss.item(), gradients, [tier_of(layer) for layer in model.model.layers]


def test_each_tier_keeps_less_and_the_gradients_stay():
    found = {tier: kept(tier) for tier in TIERS}
    bytes_kept = [found[tier][0] for tier in TIERS]
    assert bytes_kept == sorted(bytes_kept, reverse=True)
    assert bytes_kept[1] < 0.75 * bytes_kept[0]
    assert bytes_kept[2] < 0.6 * bytes_kept[1]
    assert bytes_kept[3] < 0.6 * bytes_kept[2]
    for tier in TIERS[1:]:
        assert found[tier][1] == found[False][1]
        assert found[tier][3] == [tier] * 4
        for name, gradient in found[False][2].items():
            torch.testing.assert_close(found[tier][2][name], gradient, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("tier", ["full", "medium"])
def test_layers_behind_the_first_few_are_not_computed_again_and_no_gradient_changes(tier):
    found = {}
    for first in (4, 1):
        model, blocks = tiny_model(**SHAPE), []
        undo = leave_out(model, first)
        if tier == "medium":
            use_tier(model, tier)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for number, layer in enumerate(model.model.layers):
            layer.mlp.register_forward_pre_hook(lambda *_, number=number, blocks=blocks: blocks.append(number))
        ids = torch.arange(2 * 96).reshape(2, 96) % 128
        model.model(ids).last_hidden_state.square().mean().backward()
        found[first] = blocks, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        model.gradient_checkpointing_disable()
        undo()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        assert all(layer.gradient_checkpointing for layer in model.model.layers)
    assert found[4][0] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert found[1][0] == [0, 1, 2, 3, 0]
    for name, gradient in found[4][1].items():
        assert torch.equal(found[1][1][name], gradient), name


def test_layers_are_left_out_as_far_as_the_card_has_room():
    """8B with LoRA on 20, 24 and 32 GiB, of 36 layers; compiled ones are left out from five on."""
    mapping = {
        "model": {"name": "Qwen/Qwen3-8B"}, "adapter": {"kind": "lora"}, "data": {"max_length": 2048},
        "optim": {"per_device_train_batch_size": 2, "max_steps": 1000},
        "memory": {"gradient_checkpointing": "full", "recompute_num_layers": "auto"},
    }  # fmt: skip
    shape, taken = model_facts("Qwen/Qwen3-8B"), {}
    for gib in (20, 24, 32):
        for compiled in (False, True):
            machine = Machine(gpus=(Gpu("card", gib * GiB, (9, 0)),))
            asked = {**mapping, "kernels": {"torch_compile": compiled}}
            facts = Facts(machine=machine, model=shape)
            config = resolved(read(asked).config, facts)
            taken[gib, compiled] = config.memory.recompute_num_layers
            need = sum((memory(config, facts, "full") or {}).values())
            assert taken[gib, compiled] is None or need <= 0.85 * gib * GiB
    of_plain, of_compiled = ([taken[gib, compiled] for gib in (20, 24, 32)] for compiled in (False, True))
    assert (of_plain, of_compiled) == ([None, 33, 24], [None, 31, 15])


@pytest.mark.parametrize("tier", ["selective", "medium", "full"])
def test_what_a_layer_keeps_is_what_the_estimate_counts(tier):
    model = ModelFacts("m", hidden_size=64, intermediate_size=192, head_dim=16, heads=4, kv_heads=2)
    per_layer = tier_width(model, tier) * 4 * 2 * 96
    grown = kept_by_layers(tier, 4) - kept_by_layers(tier, 2)
    assert grown / 2 == pytest.approx(per_layer, rel=0.1)


@pytest.mark.parametrize("tier", ["selective", "medium"])
def test_of_an_adapter_the_narrow_results_alone_are_kept(tier):
    with_adapter = kept_by_layers(tier, 4, adapter=True) - kept_by_layers(tier, 2, adapter=True)
    plain = kept_by_layers(tier, 4) - kept_by_layers(tier, 2)
    narrow = 2 * 7 * 4 * 4 * 2 * 96  # 2 layers of 7 projections of rank 4, in float32, for each token
    assert with_adapter - plain == pytest.approx(narrow, rel=0.1)


def kept_by_layers(tier, layers, adapter=False):
    model = tiny_model(**{**SHAPE, "layers": layers})
    if adapter:
        get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
        model.enable_input_require_grads()
    if tier != "full":
        use_tier(model, tier)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with Meter() as meter:
        states = model.model(torch.arange(2 * 96).reshape(2, 96) % 128).last_hidden_state
        gc.collect()
        assert states.requires_grad
        return meter.live


def chosen(gib, compiled=False, **shape):
    """What auto takes on a card of this size, for rows of 2,048 tokens with LoRA."""
    settings = {"model": {"name": "m"}, "adapter": {"kind": "lora"}, "data": {"max_length": 2048}}
    config = read({**settings, "kernels": {"torch_compile": compiled}}).config
    machine = Machine(gpus=(Gpu("card", gib * GiB, (9, 0)),), memory_bytes=64 * GiB)
    linears = (("q_proj", shape["hidden_size"], 2048, shape["layers"]),)
    model = ModelFacts("m", heads=16, kv_heads=8, head_dim=128, vocab_size=32_000, linears=linears, **shape)
    return resolved(config, Facts(machine=machine, model=model)).memory.gradient_checkpointing


def test_auto_takes_the_cheapest_tier_that_fits():
    large = {"parameters": 7_000_000_000, "hidden_size": 4096, "layers": 32, "intermediate_size": 12_288}
    tiers = [chosen(gib, **large) for gib in range(16, 140, 4)]
    assert tiers == sorted(tiers, key=(True, "medium", "selective", False).index)
    assert set(tiers) == {False, "selective", "medium", True}


def test_auto_computes_small_layers_again_whole():
    small = {"parameters": 600_000_000, "hidden_size": 1024, "layers": 28, "intermediate_size": 3072}
    assert {chosen(gib, **small) for gib in range(4, 40, 2)} == {False, True}
    assert {chosen(gib, compiled=True, **small) for gib in range(4, 40, 2)} == {False, "selective", "medium", True}


@pytest.mark.parametrize(
    ("method", "adapter", "rows"),
    [("sft", "lora", CONVERSATIONS), pytest.param("dpo", "lora", PAIRS, marks=pytest.mark.slow)],
)
def test_a_run_says_its_tier_and_learns_the_same(train, source, method, adapter, rows):
    settings = {"method.kind": method, "adapter.kind": adapter, "data.train": [{"path": source(rows)}]}
    losses = {}
    for tier, first in ((False, None), ("selective", 100), ("medium", 1)):
        changes = {"memory.gradient_checkpointing": tier, "memory.recompute_num_layers": first}
        run = train({**settings, "optim.max_steps": 3, **changes})
        losses[tier] = [event["loss"] for event in lines(run, "metrics")]
        said = {e["feature"]: e for e in lines(run, "receipt")[0]["entries"]}["gradient checkpointing"]
        assert (said["effective"], said["count"]) == (tier or "off", min(first or 0, 4))
        assert ("3 layers, the last ones, keep everything" in said["detail"]) == (first == 1)
        assert first == 1 or "layers, the last ones" not in said["detail"]
    assert losses["selective"] == pytest.approx(losses[False], rel=1e-6)
    assert losses["medium"] == pytest.approx(losses[False], rel=1e-6)
