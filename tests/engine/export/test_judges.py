"""Reward and process reward models leave the house as adapters merged into the base that they judge with."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

from engine import model_files
from engine.export import parity
from engine.run import checkpoint
from engine.run.store import RunFolder
from tests.engine.export.test_experts import exported
from tests.engine.export.test_packed import packed_base

Make = Callable[..., RunFolder]


@pytest.mark.parametrize(
    ("method", "kind", "sharded"), [("reward", "", "5GB"), ("reward", "gptq", "5GB"), ("prm", "", "400KB")]
)
def test_a_judge_has_no_head_for_words_any_more(
    make_run: Make, tmp_path: Path, method: str, kind: str, sharded: str
) -> None:
    """The base has a head of its own (Llama 3 8B, Mistral), of which the merged model knows nothing."""
    run = make_run("llama", method=method, adapter={}, dtype=torch.bfloat16 if kind else torch.float32, sharded=sharded)
    base = tmp_path / "base"
    assert "lm_head.weight" in model_files.stored_weights(base)
    task, labels, loader = {
        "reward": ("SEQ_CLS", 1, transformers.AutoModelForSequenceClassification),
        "prm": ("TOKEN_CLS", 2, transformers.AutoModelForTokenClassification),
    }[method]
    judge = loader.from_pretrained(base, num_labels=labels, dtype=torch.float32)
    adapted = get_peft_model(judge, LoraConfig(task_type=task, r=4, target_modules=["o_proj", "down_proj"]))
    torch.manual_seed(1)
    for weight in adapted.parameters():
        if weight.requires_grad:
            weight.data += 0.1 * torch.randn_like(weight)
    at = checkpoint.begin(run, 4)
    words = shutil.ignore_patterns("adapter*", "README*", "*manifest*")
    shutil.copytree(run.checkpoints / "checkpoint-3", at, dirs_exist_ok=True, ignore=words)
    adapted.save_pretrained(at)
    checkpoint.commit(at, {"versions": {"peft": "0"}})
    if kind:
        packed_base(run, tmp_path, kind)
    found = exported(run, tmp_path / "out")["parity"]
    assert found["logits_error"] < found["bound"]
    held = model_files.stored_weights(tmp_path / "out")
    assert "score.weight" in held
    assert "lm_head.weight" not in held


def test_a_verdict_near_nothing_is_as_near_as_the_others() -> None:
    """A reward of 0.001 that is rounded by 0.002 is no other judge; verdicts that changed places are."""
    trained, rounded = (
        [torch.tensor([[each]]) for each in found] for found in ((0.001, -0.7, 1.2), (0.003, -0.702, 1.198))
    )
    assert 0.001 < parity.distance(trained, rounded) < 0.005
    assert parity.distance(trained, [trained[1], trained[0], trained[2]]) > 0.5
