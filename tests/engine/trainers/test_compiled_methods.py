"""Compiled layers in every method: the plain numbers, each layer in whole graphs.

Methods take turns with adapters and tiers, so that few kinds of layer are compiled: what one test has compiled serves the
next from the compiler's own cache of graphs.
DoRA is not among the adapters: its numbers are the same, but PEFT takes the lengths of its weights in ways that break a
layer's graph into many, as the receipt says.
"""

from __future__ import annotations

import math
import shutil

import pytest
import torch

from tests.engine.trainers.conftest import resumed_from
from tests.engine.trainers.test_matrix import losses, receipt, settings


@pytest.fixture(scope="module")
def compiled_before(tmp_path_factory):
    """The folder of the compiler's cache, one for all tests here and gone with them."""
    return str(tmp_path_factory.mktemp("inductor"))


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU with g++")
@pytest.mark.parametrize(
    ("method", "adapter", "tier"),
    [
        pytest.param("sft", "none", False, id="sft, the head in one"),
        pytest.param("pretrain", "lora", "full", id="pretraining, adapters under checkpoints"),
        pytest.param("dpo", "unfrozen", False, id="dpo, a copied reference beside it"),
        pytest.param("ipo", "lora", "medium", id="ipo, its reference the model without adapter"),
        pytest.param("simpo", "none", False, id="simpo, no reference"),
        pytest.param("orpo", "none", False, id="orpo, no reference"),
        pytest.param("kto", "lora", "medium", id="kto, answers of other prompts beside its own"),
        pytest.param("distill", "none", False, id="distillation, a stored teacher"),
        pytest.param("reward", "lora", "full", id="a score for a head"),
        pytest.param("prm", "lora", "full", id="a score for a head at each step"),
        pytest.param("embedding", "none", "full", id="no head"),
        pytest.param("grpo", "unfrozen", "full", id="grpo, answers sampled by the plain layers"),
        pytest.param("gdpo", "unfrozen", "full", id="gdpo, answers sampled by the plain layers"),
        pytest.param("ppo", "lora", "full", id="ppo, values from the hidden states"),
    ],
)
def test_compiled_layers_learn_the_same(train, source, compiled_before, monkeypatch, method, adapter, tier):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", compiled_before)
    base = {**settings(source, method, adapter), "memory.gradient_checkpointing": tier}
    torch._dynamo.reset()
    plain, run = losses(train(base)), train({**base, "kernels.torch_compile": True})
    torch._dynamo.reset()
    assert losses(run) == pytest.approx(plain, rel=2e-5, abs=2e-6)
    said, reference = receipt(run)["torch.compile"], "reference: copy" in receipt(run)["loss"]["detail"]
    assert (said["effective"], said["count"]) == ("inductor", 4 * (2 if reference else 1))
    assert " graphs, 0 breaks" in said["detail"]


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU with g++")
@pytest.mark.parametrize(("method", "begins"), [("dpo", math.log(2)), ("ipo", 25.0)])
def test_in_bfloat16_nothing_was_learnt_before_the_first_step(
    train, source, compiled_before, monkeypatch, method, begins
):
    """DPO's loss at no margin is ln 2, IPO's (1 / 2 beta) squared: policy and reference are one graph, so alike to the bit."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", compiled_before)
    base = {**settings(source, method, "lora"), "model.dtype": "bfloat16", "memory.gradient_checkpointing": "full"}
    torch._dynamo.reset()
    run = train({**base, "kernels.torch_compile": True})
    torch._dynamo.reset()
    assert "policy and reference run the same graph" in receipt(run)["torch.compile"]["detail"]
    assert "1 graphs, 0 breaks" in receipt(run)["torch.compile"]["detail"]
    assert losses(run)[0] == pytest.approx(begins, rel=1e-7)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU with g++")
def test_a_run_that_goes_on_is_held_to_the_same_reference(train, source, compiled_before, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", compiled_before)
    base = {**settings(source, "dpo", "lora"), "model.dtype": "bfloat16", "memory.gradient_checkpointing": "full"}
    torch._dynamo.reset()
    whole = train({**base, "kernels.torch_compile": True, "optim.max_steps": 4, "run.logging_steps": 1})
    torch._dynamo.reset()
    again = train(folder=resumed_from(whole, 2, tmp_path / "again"))
    torch._dynamo.reset()
    assert "policy and reference run the same graph" in receipt(again)["torch.compile"]["detail"]
    assert losses(whole)[2] != pytest.approx(math.log(2), rel=1e-4)
    assert losses(again)[-2:] == pytest.approx(losses(whole)[-2:], rel=1e-5)
