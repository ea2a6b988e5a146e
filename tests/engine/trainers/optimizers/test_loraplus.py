"""LoRA+: second matrices learn faster, by the groups that PEFT would make, in the run and in its log."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from safetensors.torch import load_file

from engine.config.adapter import Lora
from engine.trainers.optimizers.loraplus import divide_groups
from tests.engine.features.conftest import tiny_model
from tests.engine.trainers.conftest import CONVERSATIONS, lines, resumed_from

LORA = {"adapter.kind": "lora", "adapter.r": 4, "optim.gradient_accumulation_steps": 1, "optim.max_steps": 3}


def rates(optimizer, model):
    names = {weight: name for name, weight in model.named_parameters()}
    return {names[weight]: group["lr"] for group in optimizer.param_groups for weight in group["params"]}


def test_the_groups_are_those_of_peft():
    """Of an adapter on linear layers, with lengths and biases, and on embeddings."""
    config = LoraConfig(target_modules=["q_proj", "embed_tokens"], use_dora=True, bias="all", modules_to_save=["norm"])
    model = get_peft_model(tiny_model(), config)
    theirs = create_loraplus_optimizer(
        model, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16, loraplus_lr_embedding=1e-5
    )
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    ours = torch.optim.AdamW([{"params": trained[::2], "weight_decay": 0.1}, {"params": trained[1::2]}], lr=1e-3)
    divide_groups(ours, model, Lora(loraplus_lr_ratio=16.0, loraplus_lr_embedding=1e-5))
    assert rates(ours, model) == pytest.approx(rates(theirs, model))
    assert set(rates(ours, model).values()) == {1e-3, 16e-3, 1e-5}
    assert all(group["params"] for group in ours.param_groups)
    decayed = {id(weight) for group in ours.param_groups if group["weight_decay"] == 0.1 for weight in group["params"]}
    assert decayed == {id(weight) for weight in trained[::2]}


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "sgd"])
def test_second_matrices_move_as_much_more_and_the_log_tells_their_rate(train, source, optim):
    settings = {**LORA, "data.train": [{"path": source(CONVERSATIONS)}], "optim.optim": optim, "optim.max_steps": 1}
    plain, faster = (
        train(
            {**settings, "run.save_steps": 1, "optim.lr_scheduler_type": "constant", "adapter.loraplus_lr_ratio": ratio}
        )
        for ratio in (None, 16.0)
    )
    before, after = (
        load_file(run.checkpoints / "checkpoint-1" / "adapter_model.safetensors") for run in (plain, faster)
    )
    for name in before:  # second matrices begin at 0, so they are what they moved by
        times = 16 if "lora_B" in name else 1
        torch.testing.assert_close(after[name], times * before[name], rtol=1e-4, atol=1e-9)
    (logged,) = (event for event in lines(faster, "metrics") if "learning_rate" in event)
    assert logged["learning_rate_lora_B"] == pytest.approx(16 * logged["learning_rate"])
    told = next(each for each in lines(faster, "receipt")[0]["entries"] if each["feature"] == "adapter")
    assert f"{sum('lora_B' in name for name in after)} weights learn at 16 times the rate" in told["detail"]
    assert not any("learning_rate_lora_B" in event for event in lines(plain, "metrics"))


def test_rates_of_both_groups_go_on_where_they_were(train, source, tmp_path):
    settings = {**LORA, "data.train": [{"path": source(CONVERSATIONS)}], "run.save_steps": 1}
    whole = train({**settings, "adapter.loraplus_lr_ratio": 8.0, "optim.warmup_steps": 2})
    again = train(folder=resumed_from(whole, 1, tmp_path / "again"))
    ends = [(run.checkpoints / "checkpoint-3" / "adapter_model.safetensors").read_bytes() for run in (whole, again)]
    assert ends[0] == ends[1]
