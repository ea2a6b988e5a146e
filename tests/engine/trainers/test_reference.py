"""The reference of a LoRA run is its model with the adapter off, without a second adapter wherever that gives the same."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model

from engine.trainers.reference import ReferenceTrainer
from tests.engine.features.conftest import tiny_model
from tests.engine.trainers.conftest import PAIRS, RATED, lines, resumed_from

LORA = {"adapter.kind": "lora", "adapter.r": 4, "optim.gradient_accumulation_steps": 1, "optim.max_steps": 3}


def weights(run):
    return (run.checkpoints / "checkpoint-3" / "adapter_model.safetensors").read_bytes()


def numbers(run):
    return [{key: event[key] for key in ("loss", "grad_norm")} for event in lines(run, "metrics") if "loss" in event]


def detail(run):
    return next(each for each in lines(run, "receipt")[0]["entries"] if each["feature"] == "loss")["detail"]


@pytest.mark.parametrize(
    ("kind", "rows", "saved"),
    [
        pytest.param("dpo", PAIRS, [], marks=pytest.mark.slow),
        ("kto", RATED, ["norm"]),
        pytest.param("ipo", PAIRS, ["lm_head"], marks=pytest.mark.slow),
        pytest.param("kto", RATED, [], marks=pytest.mark.slow),
    ],
)
def test_a_fresh_adapter_is_not_kept_twice_and_no_number_changes(train, source, monkeypatch, kind, rows, saved):
    settings = {**LORA, "method.kind": kind, "data.train": [{"path": source(rows)}], "adapter.modules_to_save": saved}
    ours = train(settings)
    assert not [path.name for path in ours.checkpoints.glob("checkpoint-3/ref")]
    assert "reference: adapter off" in detail(ours)
    monkeypatch.setattr(ReferenceTrainer, "without_needless_copy", lambda trainer: None)
    theirs = train(settings)
    assert [path.name for path in theirs.checkpoints.glob("checkpoint-3/ref")] == ["ref"]
    assert "reference: the adapter as it began" in detail(theirs)
    assert (numbers(ours), weights(ours)) == (numbers(theirs), weights(theirs))


def test_means_over_tokens_are_the_same_of_a_reference_that_was_computed_before(train, source):
    means = {"method.kind": "dpo", "method.dpo_norm_loss": True, "method.beta": 2.0, "method.rpo_alpha": 0.1}
    base = {**LORA, **means, "data.train": [{"path": source(PAIRS)}], "data.eval": [{"path": source(PAIRS[:4])}]}
    off, before = (train({**base, "method.reference": where}) for where in ("adapter_off", "precompute"))
    assert detail(off).endswith(
        "answers compared by means over their tokens; likelihood of the chosen weighted 0.1; reference: adapter off"
    )
    assert [each["loss"] for each in numbers(before)] == pytest.approx(
        [each["loss"] for each in numbers(off)], rel=1e-5
    )
    held_out = [
        next(event["eval_loss"] for event in lines(run, "metrics") if "eval_loss" in event) for run in (off, before)
    ]
    assert held_out[1] == pytest.approx(held_out[0], rel=1e-5)


def test_a_module_saved_whole_that_had_learnt_keeps_its_copy():
    def copied(change):
        model = get_peft_model(tiny_model(), LoraConfig(target_modules="all-linear", modules_to_save=["lm_head"]))
        model.add_adapter("ref", model.peft_config["default"])
        with torch.no_grad():
            change(model.base_model.model.lm_head.modules_to_save["ref"])
        ReferenceTrainer.without_needless_copy(SimpleNamespace(model=model))
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
        earlier.setattr(ReferenceTrainer, "without_needless_copy", lambda trainer: None)
        whole = train(settings)
    again = train(folder=resumed_from(whole, 1, tmp_path / "again"))
    assert lines(again, "started", 1)[0]["resumed_from_step"] == 1
    assert (numbers(again), weights(again)) == (numbers(whole), weights(whole))
