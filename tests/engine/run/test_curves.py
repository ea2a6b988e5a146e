"""The table of leading curves: every method of the schema has its own, and no chart stays empty."""

from __future__ import annotations

from random import Random

import pytest

from engine.config.tree import SECTIONS
from engine.run.curves import (
    CONCERNS,
    LEADING,
    LOSS_ROSE,
    MetricLabel,
    concern,
    label_of,
    leading,
    ordered,
    rose,
    watch_for,
)
from engine.run.series import Series


def test_a_loss_that_rose_and_stays_is_told_and_one_that_only_jumped_is_not() -> None:
    for method in ("sft", "dpo", "kto"):
        rising = Series()
        for step, loss in enumerate((2.0, 1.9, 5.0, 6.0, 7.0, 8.0)):
            rising.add(step, loss)
        assert concern(method, {"loss": rising}) == "", "four logged steps may be chance"
        rising.add(6, 9.0)
        assert concern(method, {"loss": rising}) == LOSS_ROSE
        assert rose(method, {"loss": rising}) == (2.0, 9.0)
        rising.add(7, 3.9)
        assert concern(method, {"loss": rising}) == ""
    falling = Series()
    for step in range(20):
        falling.add(step, 2.0 - step / 20)
    assert concern("sft", {"loss": falling}) == ""
    sampled = Series()
    for step, loss in enumerate((0.001, 5, 5, 5, 5, 5, 5)):
        sampled.add(step, loss)
    assert concern("ppo", {"loss": sampled}) == "", "the loss of sampled answers begins at nothing"
    assert len(LOSS_ROSE) <= 76


@pytest.mark.parametrize("spread", [0.3, 0.5])
def test_a_first_batch_that_was_easy_is_no_loss_that_rose(spread: float) -> None:
    """Of runs with one row a batch, whose losses lie far apart, hardly one is told what would be wrong."""
    wrong = 0
    for seed in range(200):
        noise, series, told = Random(seed), Series(), False
        for step in range(100):
            series.add(step, noise.lognormvariate(0, spread) * (1 - step / 300))
            told = told or rose("sft", {"loss": series}) is not None
        wrong += told
    assert wrong <= 6


def test_a_loss_that_rose_late_is_told_too() -> None:
    series = Series()
    for step in range(100):
        series.add(step, 2.0 - step / 100 if step < 60 else 7.0 + step % 2 / 2)
    assert rose("sft", {"loss": series}) is not None


def test_a_long_run_does_not_forget_where_its_loss_began() -> None:
    """Old steps are kept in groups; that of the first holds steps after it."""
    series = Series()
    for step in range(25_000):
        series.add(step, 7.0 + step % 2 / 2 if step else 2.0)
    assert rose("sft", {"loss": series}) == (2.0, 7.5)


def test_every_method_of_the_schema_says_which_curves_matter_and_what_to_look_for() -> None:
    for method in SECTIONS["method"]:
        assert method in LEADING
        assert len(leading(method)) >= 4
        assert 0 < len(watch_for(method)) <= 77
    assert all(len(words) <= 76 for words in CONCERNS.values())


@pytest.mark.parametrize("name", list(CONCERNS))
def test_a_run_that_samples_in_vain_is_told_after_five_steps_and_no_longer_once_one_went_well(name: str) -> None:
    series = Series()
    for step in range(4):
        series.add(step, 1.0)
    assert concern("grpo", {name: series}) == ""
    series.add(4, 1.0)
    assert concern("gdpo", {name: series, "loss": Series()}) == CONCERNS[name]
    assert concern("ppo", {name: series}) == "", "one answer a prompt is always equal to itself"
    series.add(5, 0.75)
    assert concern("grpo", {name: series}) == ""


def test_the_three_that_matter_come_first() -> None:
    names = {"loss", "entropy", "mean_token_accuracy", "grad_norm", "learning_rate", "eval_loss", "odd"}
    assert leading("sft", names)[:3] == (("loss", "eval_loss"), ("mean_token_accuracy",), ("entropy",))
    names = {"loss", "reward", "completions/mean_length", "kl", "rewards/exact/mean", "rewards/short/mean", "grad_norm"}
    assert leading("grpo", names)[:4] == (
        ("reward",), ("completions/mean_length",), ("kl",), ("rewards/exact/mean", "rewards/short/mean"),
    )  # fmt: skip


def test_a_group_that_the_run_does_not_have_gives_its_place_to_the_next() -> None:
    assert leading("dpo", {"loss", "grad_norm"}) == (("loss",), ("grad_norm",))
    assert leading("unheard of", {"loss"}) == (("loss",),)
    assert leading("sft", {"odd"}) == leading("sft")


def test_before_the_first_number_no_name_has_a_star() -> None:
    for method in LEADING:
        assert not [name for group in leading(method) for name in group if "*" in name]
        assert all(leading(method))


def test_every_curve_has_its_place_once() -> None:
    names = {"loss", "zeta", "alpha", "grad_norm", "kl"}
    assert ordered("grpo", names) == ["kl", "loss", "grad_norm", "alpha", "zeta"]
    assert ordered("grpo", set()) == []


def test_held_out_curves_stand_where_their_twins_do() -> None:
    names = [
        "eval_clip_ratio/low_min",
        "eval_loss",
        "eval_rewards/regex/mean",
        "eval_reward",
        "eval_completions/mean_length",
    ]
    assert ordered("grpo", names) == ["eval_reward", *names[:3:-1], "eval_rewards/regex/mean", "eval_loss", names[0]]


def test_words_for_names_that_only_the_run_knows() -> None:
    assert label_of("rewards/exact/mean").title == "exact"
    assert label_of("rewards/exact/std").title == "spread of exact"
    assert label_of("eval_loss").title == "held-out loss"
    assert label_of("eval_accuracy") == MetricLabel("held-out judged right", "share")
    assert label_of("my_own").title == "my own"
