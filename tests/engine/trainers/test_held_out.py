"""Rows held out while training: measured when the config says, and what follows from their loss."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from tests.engine.trainers.conftest import BASE, CONVERSATIONS, lines


def _evaluated(run: Any) -> list[int]:
    return [event["step"] for event in lines(run, "metrics") if "eval_loss" in event]


def _saved(run: Any) -> list[int]:
    return [event["step"] for event in lines(run, "checkpoint") if event["state"] == "committed"]


@pytest.mark.parametrize(("times", "steps"), [(1, [5, 10]), (2, [2, 4, 6, 8, 10]), (9, list(range(1, 11)))])
def test_evaluations_are_spread_over_an_epoch_as_it_turns_out(train, source, times, steps):
    # 48 rows, 8 held out, 8 a step: five steps an epoch, which nothing but the prepared rows tells.
    settings = {"data.train": [{"path": source(CONVERSATIONS)}], "data.val_set_size": 8}
    run = train({**settings, "run.evals_per_epoch": times})
    assert _evaluated(run) == steps
    assert lines(run, "started")[0]["pauses"] == [4, steps[0]]


def test_checkpoints_are_spread_over_an_epoch(train, source, monkeypatch):
    monkeypatch.delitem(BASE, "run.save_steps")
    settings = {"data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 12}
    assert _saved(train({**settings, "run.saves_per_epoch": 2})) == [3, 6, 9, 12]


def test_what_is_held_out_is_never_trained_on(train, source):
    settings = {"data.train": [{"path": source(CONVERSATIONS)}], "data.val_set_size": 0.25, "optim.max_steps": None}
    run = train({**settings, "optim.num_train_epochs": 2.0, "run.eval_steps": 1})
    trained = set(array("q", run.batches.read_bytes()))
    assert len(trained) == 36
    assert trained <= set(range(48))
    assert len(_evaluated(run)) == 10
