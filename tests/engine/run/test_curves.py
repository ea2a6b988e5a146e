"""The table of leading curves: every method of the schema has its own, and no chart stays empty."""

from __future__ import annotations

from random import Random

import pytest

from engine.config.tree import SECTIONS
from engine.run.curves import (
    CONCERNS,
    LEADING,
    LOSS_ROSE,
    NO_DIFFERENCE,
    NO_REWARD,
    NO_REWARD_YET,
    MetricLabel,
    concern,
    label_of,
    leading,
    no_signal,
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


def test_a_run_that_is_held_to_no_reference_is_not_told_to_watch_its_kl() -> None:
    assert watch_for("gdpo", ("reward", "kl")) == "A good run: the reward rises, lengths stay, the KL stays small."
    assert watch_for("gdpo", ("reward",)) == "A good run: the reward rises, lengths stay."


def test_what_the_guide_says_to_watch_of_answers_made_ahead_is_among_the_first_curves() -> None:
    weight = "sampling/importance_sampling_ratio/mean"
    names = ("reward", weight, "prefetch/above_cap", "prefetch/age", "prefetch/wait_seconds", "clip_ratio/low_mean")
    shown = {name for group in leading("grpo", names) for name in group}
    assert shown == set(names) - {"clip_ratio/low_mean"}


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


def series_of(*values: float) -> Series:
    made = Series()
    for step, value in enumerate(values):
        made.add(step, value)
    return made


def test_a_run_whose_answers_were_never_paid_or_never_differed_is_told_and_one_that_learned_once_is_not() -> None:
    never = {"reward": series_of(*[0.0] * 5), "reward_std": series_of(*[0.0] * 5)}
    alike = {"frac_reward_zero_std": series_of(*[1.0] * 5)}
    for method in ("grpo", "gdpo"):
        assert no_signal(method, {**never, **alike}) == NO_REWARD
        assert concern(method, {**never, **alike}) == NO_REWARD_YET
        assert no_signal(method, {"reward": series_of(1.0), "reward_std": series_of(0.0), **alike}) == NO_DIFFERENCE
        assert no_signal(method, {"reward": series_of(0.0), "reward_std": series_of(0.5), **alike}) == NO_DIFFERENCE
        for last in (0.75, 1.0):
            once = {"frac_reward_zero_std": series_of(1.0, 0.75, last), "reward": series_of(0.0, 0.1, 0.0)}
            assert no_signal(method, {**never, **once}) == ""
    assert no_signal("ppo", never) == NO_REWARD, "it has no groups"
    assert no_signal("ppo", alike) == ""
    assert no_signal("sft", never) == ""
    assert no_signal("grpo", {}) == ""
    assert concern("grpo", {name: series_of(0.0, 0.0) for name in never}) == "", "two steps may be chance"
    cut = {**never, "completions/clipped_ratio": series_of(0.2, 0.9)}
    assert no_signal("grpo", cut) == f"{NO_REWARD}; 90 % of the last were cut off"
    assert len(NO_REWARD_YET) <= 76


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
