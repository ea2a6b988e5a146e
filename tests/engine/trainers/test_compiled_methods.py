"""Compiled layers in every way in which a method calls its model: the plain numbers, each layer in whole graphs.

DoRA is not among the adapters: its numbers are the same, but PEFT takes the lengths of its weights in ways that break a
layer's graph into many, as the receipt says.
"""

from __future__ import annotations

import shutil

import pytest
import torch

from tests.engine.trainers.test_matrix import losses, receipt, settings


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU with g++")
@pytest.mark.parametrize(
    ("method", "adapter", "tier"),
    [
        pytest.param("sft", "none", False, id="sft, the head in one"),
        pytest.param("pretrain", "lora", "full", id="pretraining, adapters under checkpoints"),
        pytest.param("dpo", "unfrozen", False, id="dpo, a copied reference beside it"),
        pytest.param("reward", "lora", "full", id="a score for a head"),
        pytest.param("embedding", "none", "full", id="no head"),
        pytest.param("grpo", "unfrozen", "full", id="grpo, answers sampled by the plain layers"),
    ],
)
def test_compiled_layers_learn_the_same(train, source, tmp_path, monkeypatch, method, adapter, tier):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    base = {**settings(source, method, adapter), "memory.gradient_checkpointing": tier}
    torch._dynamo.reset()
    plain, run = losses(train(base)), train({**base, "kernels.torch_compile": True})
    torch._dynamo.reset()
    assert losses(run) == pytest.approx(plain, rel=2e-5, abs=2e-6)
    said, reference = receipt(run)["torch.compile"], "reference: copy" in receipt(run)["loss"]["detail"]
    assert (said["effective"], said["count"]) == ("inductor", 4 * (2 if reference else 1))
    assert " graphs, 0 breaks" in said["detail"]
