"""A run that goes on with other settings trains with them, and not with those of its checkpoint."""

from __future__ import annotations

import pytest
import torch

from engine.errors import UsageError
from engine.session.resume import changed_config
from tests.engine.trainers.conftest import CONVERSATIONS, lines, resumed_from


def test_a_finished_run_is_trained_longer_with_another_rate_weight_decay_and_momentum(train, source):
    settings = {"data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 4, "run.save_steps": 4,
                "optim.optim": "muon"}  # fmt: skip
    run = train({**settings, "optim.learning_rate": 1e-3, "optim.lr_scheduler_type": "linear"})
    with pytest.raises(UsageError, match=r"optim\.max_steps: must be"):
        changed_config(run, {"optim.max_steps": 0})
    changed = {"optim.max_steps": 8, "optim.learning_rate": 2e-4, "optim.weight_decay": 0.5}
    run.config.write_text(changed_config(run, {**changed, "optim.optim_args": {"momentum": 0.5}}))
    again = train(folder=run)
    rates = {entry["step"]: entry["learning_rate"] for entry in lines(again, "metrics") if "learning_rate" in entry}
    assert max(rates) == 8
    # Linear from 2e-4 to 0 over eight steps; the checkpoint's own schedule was over, at a rate five times as high.
    assert rates[6] == pytest.approx(2e-4 * (8 - 5) / 8)
    assert rates[8] == pytest.approx(2e-4 / 8)
    groups = torch.load(run.checkpoints / "checkpoint-8" / "optimizer.pt", weights_only=True)["param_groups"]
    assert {group["momentum"] for group in groups if "momentum" in group} == {0.5}
    assert {group["weight_decay"] for group in groups} == {0.5, 0.0}
    assert lines(again, "started")[-1]["resumed_from_step"] == 4
    assert lines(again, "finished")[-1]["step"] == 8


def test_half_the_batch_and_twice_the_passes_go_on_over_the_same_rows(train, source):
    settings = {"data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 6, "run.save_steps": 3,
                "optim.per_device_train_batch_size": 4}  # fmt: skip
    run = train(settings)
    again = resumed_from(run, 3, run.path.parent / "again")
    halves = {"optim.per_device_train_batch_size": 2, "optim.gradient_accumulation_steps": 4}
    again.config.write_text(changed_config(again, halves))
    train(folder=again)
    losses = [{entry["step"]: entry["loss"] for entry in lines(each, "metrics")} for each in (run, again)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert lines(again, "started")[-1]["resumed_from_step"] == 3
    assert not [found for found in lines(again, "finding") if found["path"] == "optim.gradient_accumulation_steps"]


def test_another_number_of_rows_a_step_is_told(train, source):
    """One device in the place of two, say: the place in the rows is counted in steps."""
    settings = {"data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 4, "run.save_steps": 3}
    run = train(settings)
    again = resumed_from(run, 3, run.path.parent / "again")
    again.config.write_text(changed_config(again, {"optim.gradient_accumulation_steps": 1}))
    train(folder=again)
    (told,) = [found for found in lines(again, "finding") if found["path"] == "optim.gradient_accumulation_steps"]
    assert told["message"].startswith("A step learns from 4 rows now, and learned from 8 before checkpoint-3. ")
    assert "so some of this epoch's are learned from twice;" in told["message"]
    anew = resumed_from(run, 3, run.path.parent / "anew")
    changed = {"optim.gradient_accumulation_steps": 1, "data.ignore_data_skip": True}
    anew.config.write_text(changed_config(anew, changed))
    train(folder=anew)
    assert lines(anew, "started")[-1]["resumed_from_step"] == 3
    assert not [found for found in lines(anew, "finding") if found["path"] == "optim.gradient_accumulation_steps"], (
        "the epoch begins anew, whatever the steps before it learned from"
    )
