"""Rows held out while training: measured when the config says, and what follows from their loss."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest

from engine.run.best import best_text
from engine.run.ending import end_of
from engine.run.store import RunFolder
from engine.run.view import RunView, fold
from tests.engine.trainers.conftest import BASE, CONVERSATIONS, PAIRS, lines, resumed_from
from widgets.telling import head, summary_of
from workbench.cli.following import ending
from workbench.panels.watching import StatusLine


def _evaluated(run: Any) -> list[int]:
    return [event["step"] for event in lines(run, "metrics") if "eval_loss" in event]


def _saved(run: Any) -> list[int]:
    return [event["step"] for event in lines(run, "checkpoint") if event["state"] == "committed"]


@pytest.mark.parametrize(
    ("times", "steps"),
    [
        (2, [2, 4, 6, 8, 10]),
        pytest.param(1, [5, 10], marks=pytest.mark.slow),
        pytest.param(9, list(range(1, 11)), marks=pytest.mark.slow),
    ],
)
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


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("reward", ("eval_accuracy", "eval_margin", "eval_mean_reward")),
        ("dpo", ("eval_rewards/accuracies", "eval_rewards/margins", "eval_rewards/chosen")),
    ],
)
def test_a_held_out_pair_counts_alike_in_a_smaller_last_batch(train, source, kind, names):
    settings = {
        "method.kind": kind,
        "data.train": [{"path": source(PAIRS)}],
        "data.val_set_size": 5,
        "run.eval_steps": 2,
    }
    settings |= {"optim.max_steps": 2, "optim.learning_rate": 1e-2}
    five, four = (lines(train({**settings, "optim.per_device_eval_batch_size": rows}), "metrics") for rows in (5, 4))
    for name in names:
        (whole,), (parts,) = ([event[name] for event in events if name in event] for events in (five, four))
        assert parts == pytest.approx(whole, rel=1e-3, abs=1e-6), name


# A loss that falls is never better where more is better: the first evaluation stays the best one.
WORSE = {"run.eval_steps": 1, "run.greater_is_better": True, "optim.max_steps": 10, "run.save_steps": 2}


def _view(run: RunFolder) -> RunView:
    return fold(RunView(), [json.loads(line) for line in run.events.read_text().splitlines()])


def _kept(run: RunFolder) -> list[int]:
    return sorted(int(path.name.partition("-")[2]) for path in run.checkpoints.glob("checkpoint-*"))


def test_a_run_that_gets_no_better_ends_early_and_says_so(train, source):
    settings = {"data.train": [{"path": source(CONVERSATIONS)}], "data.val_set_size": 8, **WORSE}
    run = train({**settings, "optim.early_stopping_patience": 3, "run.save_total_limit": 2})
    assert _evaluated(run) == [1, 2, 3, 4]
    (end,) = lines(run, "finished")
    assert end["message"] == "stopped early at step 4: held-out loss has not risen for 3 evaluations"
    view = _view(run)
    assert (view.state, view.cause_kind, view.step) == ("finished", "early_stopping", 4)
    assert view.best["step"] == 1
    # The best one is kept beside the two newest.
    assert _kept(run) == view.committed == [1, 2, 4]
    best = best_text(view)
    assert best.startswith("checkpoint-1 is the best: held-out loss ")
    view.id = "my-0001"
    for said in (
        ending(view, "my-0001"),
        summary_of(view),
        head(view)["by"],
        StatusLine._choose(view, "", "", end_of(view, run, "my-0001"))[0],
    ):
        assert "stopped early at step 4: held-out loss has not risen for 3 evaluations" in said
        assert best in said


def test_better_by_less_than_the_threshold_is_not_better_and_the_best_is_still_the_best(train, source):
    """The loss falls at each evaluation, by less than one."""
    settings = {"data.train": [{"path": source(CONVERSATIONS)}], "data.val_set_size": 8, "run.eval_steps": 1}
    more = {"optim.early_stopping_patience": 2, "optim.max_steps": 5, "optim.learning_rate": 1e-4}
    run = train({**settings, **more, "optim.early_stopping_threshold": 1.0})
    losses = [event["eval_loss"] for event in lines(run, "metrics") if "eval_loss" in event]
    assert losses == sorted(losses, reverse=True)
    assert _evaluated(run) == [1, 2, 3]
    (end,) = lines(run, "finished")
    assert end["message"] == "stopped early at step 3: held-out loss has not fallen by more than 1 for 2 evaluations"
    assert _view(run).best["step"] == 3
    plain = train({**settings, **more, "optim.early_stopping_threshold": 1e-9})
    assert _evaluated(plain) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("step", [2, *(pytest.param(step, marks=pytest.mark.slow) for step in (1, 4))])
def test_patience_and_the_best_survive_a_kill(train, source, tmp_path, step):
    settings = {"data.train": [{"path": source(CONVERSATIONS)}], "data.val_set_size": 8, **WORSE}
    whole = train({**settings, "optim.early_stopping_patience": 3})
    again = train(folder=resumed_from(whole, step, tmp_path / "again"))
    assert lines(again, "started", 1)[0]["resumed_from_step"] == step
    (end,) = [event for event in lines(again, "finished") if event["segment"] == 1]
    assert end["message"] == lines(whole, "finished")[0]["message"]
    assert end["step"] == 4
    of = {event["step"]: event["eval_loss"] for event in lines(whole, "metrics") if "eval_loss" in event}
    later = {event["step"]: event["eval_loss"] for event in lines(again, "metrics", 1) if "eval_loss" in event}
    assert later == {at: value for at, value in of.items() if at > step}
    assert _view(again).best == _view(whole).best


def test_the_best_is_the_lowest_held_out_loss(train, source):
    settings = {"data.train": [{"path": source(CONVERSATIONS)}], "data.val_set_size": 8, "run.eval_steps": 2}
    run = train({**settings, "run.save_steps": 100, "optim.max_steps": 6})
    losses = {event["step"]: event["eval_loss"] for event in lines(run, "metrics") if "eval_loss" in event}
    best = min(losses, key=losses.__getitem__)
    assert _view(run).best == {"step": best, "metric": "eval_loss", "value": losses[best]}
    assert best in _saved(run)
    plain = train({**settings, "run.save_steps": 100, "optim.max_steps": 6, "run.save_best": False})
    assert _saved(plain) == [6]


def test_answers_that_are_rewarded_are_told_by_their_reward(train, source):
    from tests.engine.trainers.test_matrix import settings as of_method

    settings = of_method(source, "grpo", "none") | {"data.val_set_size": 8, "run.eval_steps": 1, "optim.max_steps": 2}
    run = train({**settings, "method.reward_funcs": ["regex:[aeiou]"]})
    rewards = [event["eval_reward"] for event in lines(run, "metrics") if "eval_reward" in event]
    best = _view(run).best
    assert (best["metric"], best["value"]) == ("eval_reward", max(rewards))


def test_a_metric_that_is_not_measured_is_named_with_those_that_are(train, source):
    settings = {"data.train": [{"path": source(CONVERSATIONS)}], "data.val_set_size": 8, "run.eval_steps": 1}
    run = train({**settings, "run.metric_for_best_model": "bleu"}, code=1)
    message = lines(run, "failed")[0]["message"]
    assert message.startswith("run.metric_for_best_model: bleu is not measured on held-out rows; there are ")
    assert "loss" in message
