"""The reference of a LoRA run is its model with the adapter off, without a second adapter wherever that gives the same."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model

from engine.trainers import dpo, kto
from engine.trainers.reference import without_needless_copy
from tests.engine.patches.conftest import tiny_model
from tests.engine.trainers.conftest import PAIRS, RATED, lines, resumed_from

LORA = {"adapter.kind": "lora", "adapter.r": 4, "optim.gradient_accumulation_steps": 1, "optim.max_steps": 3}


def weights(run):
    return (run.checkpoints / "checkpoint-3" / "adapter_model.safetensors").read_bytes()


def numbers(run):
    return [{key: event[key] for key in ("loss", "grad_norm")} for event in lines(run, "metrics") if "loss" in event]


def detail(run):
    return next(each for each in lines(run, "receipt")[0]["entries"] if each["feature"] == "loss")["detail"]


@pytest.mark.parametrize(
    ("kind", "module", "rows", "saved"),
    [("dpo", dpo, PAIRS, []), ("ipo", dpo, PAIRS, ["lm_head"]), ("kto", kto, RATED, []), ("kto", kto, RATED, ["norm"])],
)
def test_a_fresh_adapter_is_not_kept_twice_and_no_number_changes(train, source, monkeypatch, kind, module, rows, saved):
    settings = {**LORA, "method.kind": kind, "data.train": [{"path": source(rows)}], "adapter.modules_to_save": saved}
    ours = train(settings)
    assert not [path.name for path in ours.checkpoints.glob("checkpoint-3/ref")]
    assert "reference: adapter off" in detail(ours)
    monkeypatch.setattr(module, "without_needless_copy", lambda trainer: None)
    theirs = train(settings)
    assert [path.name for path in theirs.checkpoints.glob("checkpoint-3/ref")] == ["ref"]
    assert "reference: the adapter as it began" in detail(theirs)
    assert (numbers(ours), weights(ours)) == (numbers(theirs), weights(theirs))


def test_a_module_saved_whole_that_had_learnt_keeps_its_copy():
    def copied(change):
        model = get_peft_model(tiny_model(), LoraConfig(target_modules="all-linear", modules_to_save=["lm_head"]))
        model.add_adapter("ref", model.peft_config["default"])
        with torch.no_grad():
            change(model.base_model.model.lm_head.modules_to_save["ref"])
        without_needless_copy(SimpleNamespace(model=model))
        return "ref" in model.peft_config

    assert not copied(lambda head: None)
    assert copied(lambda head: head.weight[0, 0].add_(1e-3))
    assert copied(lambda head: head.bfloat16())


def test_an_adapter_that_a_switch_would_round_otherwise_keeps_its_copy(train, source):
    run = train({**LORA, "method.kind": "dpo", "data.train": [{"path": source(PAIRS)}], "adapter.use_dora": True})
    assert [path.name for path in run.checkpoints.glob("checkpoint-3/ref")] == ["ref"]
    assert "reference: the adapter as it began" in detail(run)


def test_a_checkpoint_with_a_copy_goes_on_as_it_would_have(train, source, monkeypatch, tmp_path):
    """As runs of earlier versions left them."""
    settings = {**LORA, "method.kind": "dpo", "data.train": [{"path": source(PAIRS)}], "run.save_steps": 1}
    with monkeypatch.context() as earlier:
        earlier.setattr(dpo, "without_needless_copy", lambda trainer: None)
        whole = train(settings)
    again = train(folder=resumed_from(whole, 1, tmp_path / "again"))
    assert lines(again, "started", 1)[0]["resumed_from_step"] == 1
    assert (numbers(again), weights(again)) == (numbers(whole), weights(whole))
