"""Liger's own kernels on a card: errors no larger than the plain layers' rounding, a run that tells them, and their timing."""

from __future__ import annotations

import pytest
import torch

from engine.features.auto_compose import apply as auto_compose
from engine.features.liger_kernel import apply as liger
from tests.engine.features.conftest import built_of
from tests.engine.features.families import batches, made
from tests.engine.features.liger_kernel.interpreted import ON, compare, difference, step
from tests.engine.trainers.conftest import CONVERSATIONS, lines

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SHAPE = {"hidden_size": 256, "intermediate_size": 768, "head_dim": 64, "num_attention_heads": 4}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3", "qwen3_5"])
def test_in_float32_logits_and_gradients_are_the_classes(family):
    pytest.importorskip("liger_kernel")
    found = compare(family, "cuda")
    assert (found["logits"] < 1e-5, found["gradients"] < 1e-4, found["again"] < 1e-5) == (True, True, True), found


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_in_bfloat16_no_weight_learns_further_from_float32_than_by_the_classes(family):
    pytest.importorskip("liger_kernel")
    model = made(family, **SHAPE).to("cuda", torch.bfloat16)
    ids = batches(1, 4, 60, "cuda")[0]
    plain = step(model, ids)[1]
    _, undo = liger.use(ON, built_of(type("Trainer", (), {"model": model})()))
    ours = step(model, ids)[1]
    undo()
    true = step(model.float(), ids)[1]
    for name, wanted in true.items():
        error, usual = (difference(found[name], wanted) for found in (ours, plain))
        assert error <= 1.5 * usual + 1e-3, (name, error, usual)


@pytest.mark.parametrize("tier", [False, "full", "medium"])
def test_a_run_learns_the_same_and_its_receipt_tells_parts(train, source, tier):
    pytest.importorskip("liger_kernel")
    base = {
        "model.dtype": "bfloat16", "data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 4, "adapter.kind": "lora",
        "memory.gradient_checkpointing": tier, "kernels.torch_compile": False,
    }  # fmt: skip
    plain, run = train(base), train({**base, "kernels.use_liger_kernel": True})
    losses = [[event["loss"] for event in lines(each, "metrics") if "loss" in event] for each in (plain, run)]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    said = {entry["feature"]: entry for event in lines(run, "receipt") for entry in event["entries"]}[liger.FEATURE]
    assert said["effective"] == ("rms_norm + swiglu" if tier == "medium" else "rms_norm + rope + swiglu")
    assert said["count"] == 17 + 4 + (0 if tier == "medium" else 4)


def test_its_parts_are_timed_and_the_table_tells_them(train, source):
    pytest.importorskip("liger_kernel")
    others = dict.fromkeys(("use_cut_ce", "fused_lora", "fused_experts", "torch_compile"), False)
    run = train(
        {
            "model.dtype": "bfloat16", "data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 1,
            "adapter.kind": "lora", "kernels.kernel_auto_compose": True,
            **{f"kernels.{name}": value for name, value in others.items()},
        }
    )  # fmt: skip
    said = {entry["feature"]: entry for event in lines(run, "receipt") for entry in event["entries"]}
    timed = said[auto_compose.FEATURE]
    assert "Liger's parts by themselves: rms_norm " in timed["detail"], timed
    taken = said.get(liger.FEATURE, {"effective": "off"})["effective"] != "off"
    assert taken is ("Liger kernels" in timed["effective"])
