"""Which curves of a run matter most, per method, and what each is called: one table for every window.

The names are those that the trainers log, as TRL has them. Each method has groups of curves that belong on one chart,
the three that tell most about it first; `*` in a name stands for what only the run knows, such as the name of a reward
function. One decision worth knowing: a group of which the run has no curve is left out, so the next one moves up and
no window shows an empty chart. Standard library only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Final

from engine.errors import visible
from engine.figures import brief, number, percent, size
from engine.run.series import Series

Groups = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class MetricLabel:
    """How a metric is shown. `unit` is share, bytes, seconds or nothing."""

    title: str
    unit: str = ""


# At most 20 cells where it can be said in them: the list beside the curves is that narrow.
KNOWN: dict[str, MetricLabel] = {
    "loss": MetricLabel("loss"),
    "eval_loss": MetricLabel("held-out loss"),
    "nll_loss": MetricLabel("loss of chosen"),
    "aux_loss": MetricLabel("router loss"),
    "experts/entropy": MetricLabel("spread over experts", "share"),
    "experts/fullest": MetricLabel("fullest expert"),
    "experts/unused": MetricLabel("experts unused", "share"),
    "log_odds_ratio": MetricLabel("log odds ratio"),
    "log_odds_chosen": MetricLabel("log odds of chosen"),
    "mean_token_accuracy": MetricLabel("token accuracy", "share"),
    "entropy": MetricLabel("entropy"),
    "entropy/computed": MetricLabel("entropy of computed"),  # of answers that go through the loss's passes
    "kl": MetricLabel("KL divergence"),  # to the reference, and in distillation to the teacher
    "rewards/margins": MetricLabel("reward margin"),
    "rewards/accuracies": MetricLabel("pairs judged right", "share"),
    "rewards/chosen": MetricLabel("reward of chosen"),
    "rewards/rejected": MetricLabel("reward of rejected"),
    "logps/chosen": MetricLabel("log-prob of chosen"),
    "logps/rejected": MetricLabel("log-prob of rejected"),
    "logits/chosen": MetricLabel("logits of chosen"),
    "logits/rejected": MetricLabel("logits of rejected"),
    "reward": MetricLabel("reward"),
    "reward_std": MetricLabel("reward spread"),
    "frac_reward_zero_std": MetricLabel("groups all equal", "share"),
    "frac_tokens_skipped": MetricLabel("tokens left out", "share"),
    "num_skipped_tokens": MetricLabel("left out so far"),
    "reroll/groups": MetricLabel("prompts come back"),
    "reroll/waiting": MetricLabel("failed prompts wait"),
    "reroll/given_up": MetricLabel("prompts given up"),
    "replay/share": MetricLabel("groups replayed", "share"),
    "replay/age": MetricLabel("steps since sampled"),
    "replay/kept": MetricLabel("groups in the buffer"),
    "replay/bytes": MetricLabel("replay buffer", "bytes"),
    "prefetch/age": MetricLabel("answers' age, steps"),
    "prefetch/wait_seconds": MetricLabel("waiting for answers", "seconds"),
    "prefetch/above_cap": MetricLabel("weight above bound", "share"),
    "sampling/importance_sampling_ratio/mean": MetricLabel("weight of answers"),
    "sampling/importance_sampling_ratio/max": MetricLabel("largest weight"),
    "sampling/importance_sampling_ratio/min": MetricLabel("smallest weight"),
    "sampling/sampling_logp_difference/mean": MetricLabel("log-prob moved"),
    "sampling/sampling_logp_difference/max": MetricLabel("log-prob moved most"),
    "completions/mean_length": MetricLabel("completion length"),
    "completions/min_length": MetricLabel("shortest completion"),
    "completions/max_length": MetricLabel("longest completion"),
    "completions/clipped_ratio": MetricLabel("answers cut off", "share"),
    "completions/mean_terminated_length": MetricLabel("length when ended"),
    "clip_ratio/region_mean": MetricLabel("clipped", "share"),
    "objective/rlhf_reward": MetricLabel("reward less KL"),
    "objective/scores": MetricLabel("score"),
    "objective/kl": MetricLabel("KL to the reference"),
    "objective/entropy": MetricLabel("entropy of answers"),
    "objective/non_score_reward": MetricLabel("KL penalty"),
    "loss/policy_avg": MetricLabel("policy loss"),
    "loss/value_avg": MetricLabel("value loss"),
    "policy/entropy_avg": MetricLabel("entropy"),
    "policy/clipfrac_avg": MetricLabel("clipped", "share"),
    "val/ratio": MetricLabel("ratio new to old"),
    "val/clipfrac_avg": MetricLabel("value clipped", "share"),
    "accuracy": MetricLabel("judged right", "share"),
    "margin": MetricLabel("margin"),
    "eval_spearman_cosine": MetricLabel("held-out spearman"),
    "eval_recall@1": MetricLabel("found first", "share"),
    "eval_recall@5": MetricLabel("found in five", "share"),
    "eval_recall@10": MetricLabel("found in ten", "share"),
    "mean_reward": MetricLabel("mean score"),
    "min_reward": MetricLabel("lowest score"),
    "max_reward": MetricLabel("highest score"),
    "grad_norm": MetricLabel("gradient norm"),
    "learning_rate": MetricLabel("learning rate"),
    "tokens_per_second": MetricLabel("tokens per second"),
    "step_seconds": MetricLabel("one step", "seconds"),
    "data_seconds": MetricLabel("waiting for data", "seconds"),
    "mfu": MetricLabel("of the card's peak", "share"),
    "memory_peak": MetricLabel("peak memory", "bytes"),
    "memory_allocated": MetricLabel("memory", "bytes"),
    "memory_reserved": MetricLabel("memory reserved", "bytes"),
}

_LOSS: Final = ("loss", "eval_loss")
_ALWAYS: Groups = (
    ("grad_norm",), ("learning_rate",), ("tokens_per_second",), ("memory_allocated",),
    ("experts/entropy", "experts/unused"), ("experts/fullest",), ("communication/rank*",),
)  # fmt: skip
_TEXT: Groups = (_LOSS, ("mean_token_accuracy", "eval_mean_token_accuracy"), ("entropy",))
_PAIRS: Groups = (
    ("rewards/margins", "eval_rewards/margins"), ("rewards/accuracies", "eval_rewards/accuracies"), _LOSS,
    ("rewards/chosen", "rewards/rejected"),
)  # fmt: skip
_GROUPS: Groups = (
    ("reward", "eval_reward"), ("completions/mean_length", "completions/max_length"), ("kl",),
    ("rewards/*/mean",), ("frac_reward_zero_std", "frac_tokens_skipped", "replay/share", "completions/clipped_ratio"),
    ("entropy", "entropy/computed"), ("replay/age",), _LOSS, ("prefetch/wait_seconds",),
    ("sampling/importance_sampling_ratio/mean",), ("prefetch/above_cap",), ("prefetch/age",),
)  # fmt: skip
_SCORES: Groups = (
    ("accuracy", "eval_accuracy"), ("margin", "eval_margin"), _LOSS, ("mean_reward", "min_reward", "max_reward"),
)  # fmt: skip
LEADING: dict[str, Groups] = {
    "sft": _TEXT,
    "pretrain": _TEXT,
    "dpo": _PAIRS,
    "ipo": _PAIRS,
    "simpo": (*_PAIRS, ("nll_loss",)),
    "orpo": (*_PAIRS, ("nll_loss",), ("log_odds_ratio",)),
    "kto": (_PAIRS[0], _PAIRS[3], _LOSS, ("kl",)),
    "grpo": _GROUPS,
    "gdpo": (_GROUPS[0], ("rewards/*/mean",), *(group for group in _GROUPS[1:] if group != ("rewards/*/mean",))),
    "ppo": (
        ("objective/rlhf_reward", "objective/scores", "reward"),
        ("objective/kl", "kl"),
        ("loss/value_avg", "value_loss"),
        ("completions/mean_length", "completions/max_length"),
        ("loss/policy_avg", "policy_loss"),
        ("policy/entropy_avg", "entropy"),
        _LOSS,
    ),
    "reward": _SCORES,
    "prm": _SCORES,
    "embedding": (
        ("eval_recall@1", "eval_recall@5", "eval_recall@10", "eval_spearman_cosine"),
        _LOSS,
        ("accuracy", "eval_accuracy"),
        ("margin", "eval_margin"),
    ),
    "distill": (_LOSS, ("mean_token_accuracy", "eval_mean_token_accuracy"), ("kl",), ("entropy",)),
}
# At most 76 cells: it stands on the status line.
WATCH_FOR: dict[str, str] = {
    "sft": "A good run: loss and held-out loss fall together.",
    "pretrain": "A good run: loss and held-out loss fall, slowly, together.",
    "dpo": "A good run: the margin grows, and more than half of the pairs come out right.",
    "kto": "A good run: the reward of good answers rises above that of bad ones.",
    "grpo": "A good run: the reward rises, lengths stay{kl}.",
    "ppo": "A good run: the reward rises, the KL stays small, the value loss falls.",
    "reward": "A good run: the share judged right rises, on held-out rows too.",
    "embedding": "A good run: more held-out texts are found or rank right; the loss falls.",
    "distill": "A good run: the loss falls, on held-out rows too.",
}
# Shares that say, at 1, that a run samples in vain; at most 76 cells too.
CONCERNS: dict[str, str] = {
    "frac_reward_zero_std": "Nothing is learned now: all answers to a prompt get the same reward.",
    "completions/clipped_ratio": "Every answer is cut off: a higher method.max_completion_length lets it end.",
}
_LIKE = {"ipo": "dpo", "simpo": "dpo", "orpo": "dpo", "gdpo": "grpo", "prm": "reward"}


def watch_for(method: str, names: Collection[str] = ()) -> str:
    """What a good run of this method looks like, in a sentence; nothing for a method without one. `names` are the curves that the
    run has: one that is held to no reference has no KL to look at."""
    return WATCH_FOR.get(_LIKE.get(method, method), "").format(kl=", the KL stays small" if "kl" in names else "")


STALLED = 5  # logged steps in a row: one such step is chance
LOOKED_BACK = 20
"""Logged steps at most over which a loss must have stayed up: a quarter of them all. A first batch may have been easy."""
BROKEN = 2.0
"""So many times the loss of the first step, and so many times what a step differs from the next: batches differ less."""
NO_REWARD_YET = "No answer has earned a reward yet: add an easier one, for part of the way."
NO_REWARD = (
    "no answer ever earned a reward, so nothing was learned: add a reward for a part of the way, or start from a model that "
    "sometimes gets it right"
)
NO_DIFFERENCE = (
    "the answers to a prompt always got the same reward, so nothing was learned: raise method.temperature or "
    "method.num_generations, or take prompts or rewards that tell answers apart"
)
LOSS_ROSE = "The loss is twice what it was at first: the learning rate may be too high."
_SAMPLED = ("grpo", "ppo")  # whose loss begins at nothing and says little


def rose(method: str, series: Mapping[str, Series]) -> tuple[float, float] | None:
    """The first and the newest loss of a run that has stayed far above where it began; None for one that has not."""
    if _LIKE.get(method, method) in _SAMPLED or "loss" not in series:
        return None
    # Of a long run in groups, of which the first holds steps behind it too.
    _, low, _ = series["loss"].points()
    newest = low[-min(max(STALLED, len(low) // 4), LOOKED_BACK) :]
    if len(low) <= STALLED or low[0] <= 0 or min(newest) <= BROKEN * low[0]:
        return None
    differs = sum(abs(later - each) for each, later in pairwise(newest)) / (len(newest) - 1)
    last = series["loss"].last
    return (low[0], last[1]) if last is not None and min(newest) - low[0] > BROKEN * differs else None


def no_signal(method: str, series: Mapping[str, Series]) -> str:
    """Why a run on rewards learned nothing from its first step to its newest, with the way out; mostly nothing."""
    kind = _LIKE.get(method, method)
    if kind not in _SAMPLED:
        return ""
    if _never_paid(series):
        words = NO_REWARD
    elif kind == "grpo" and (alike := _bounds(series, "frac_reward_zero_std")) is not None and alike[0] >= 1:
        words = NO_DIFFERENCE
    else:
        return ""
    cut = series["completions/clipped_ratio"].last if "completions/clipped_ratio" in series else None
    return f"{words}; {percent(cut[1])} of the last were cut off" if cut is not None and cut[1] > 0.5 else words


def _never_paid(series: Mapping[str, Series]) -> bool:
    """Whether all rewards were 0: their mean and their spread."""
    return all(_bounds(series, name) == (0, 0) for name in ("reward", "reward_std"))


def _bounds(series: Mapping[str, Series], name: str) -> tuple[float, float] | None:
    """The least and the most of a curve; None of one that is not there."""
    if name not in series or not len(series[name]):
        return None
    _, low, high = series[name].points()
    return min(low), max(high)


def concern(method: str, series: Mapping[str, Series]) -> str:
    """What the newest steps warn of, in a sentence; mostly nothing: a loss that rose and stays, answers never paid, all alike or
    cut."""
    if rose(method, series) is not None:
        return LOSS_ROSE
    if _LIKE.get(method, method) in _SAMPLED and _never_paid(series) and len(series["reward"]) >= STALLED:
        return NO_REWARD_YET
    if _LIKE.get(method, method) != "grpo":  # PPO has one answer a prompt, which is always equal to itself
        return ""
    for name, words in CONCERNS.items():
        values = series[name].points()[1] if name in series else ()
        if len(values) >= STALLED and min(values[-STALLED:]) >= 1:
            return words
    return ""


def told_by(known: Collection[str]) -> tuple[str, str]:
    """The metrics that tell a run in one line, of its steps and of held-out rows: rewards where answers are sampled, since the
    loss begins at nothing and says little there; else losses. `known` are the metrics that it has."""
    return ("reward", "eval_reward") if "reward" in known else _LOSS


def leading(method: str, names: Collection[str] = ()) -> Groups:
    """Groups of curves, the most telling first. With `names`, the curves of a run, only those
    that it has; all of them while it has none."""
    own = LEADING.get(method, (_LOSS,))
    groups = (*own, *(group for group in _ALWAYS if group not in own))
    charts = tuple(group for known in groups if (group := _present(known, names)))
    bare = (tuple(name for name in group if "*" not in name) for group in groups)
    return charts or tuple(group for group in bare if group)


def _present(group: tuple[str, ...], names: Collection[str]) -> tuple[str, ...]:
    present: list[str] = []
    for wanted in group:
        present += sorted(name for name in names if fnmatchcase(name, wanted)) if "*" in wanted else [wanted]
    return tuple(name for name in present if name in names)


def ordered(method: str, names: Collection[str]) -> list[str]:
    """All of these curves, the leading ones first in their order, each before its twin of held-out rows, the others by name."""
    known = {*names, *(name.removeprefix("eval_") for name in names)}
    twins = (each for group in leading(method, known) for name in group for each in (name, f"eval_{name}"))
    first = dict.fromkeys(name for name in twins if name in names)
    return [*first, *sorted(set(names) - first.keys())]


_OF_RANK = re.compile(r"communication/rank(\d+)")
_OF_FUNCTION = re.compile(r"rewards/(?P<name>.+)/(?P<what>mean|std)")


def label_of(name: str) -> MetricLabel:
    """What a metric is called; one that nobody knows goes by its own name, and the caller makes it safe to draw."""
    if name in KNOWN:
        return KNOWN[name]
    if match := _OF_FUNCTION.fullmatch(name):
        return MetricLabel(f"{'spread of ' if match['what'] == 'std' else ''}{match['name']}")
    if match := _OF_RANK.fullmatch(name):
        return MetricLabel(f"rank {match[1]} comm wait", "share")
    if name.startswith("eval_"):
        twin = label_of(name.removeprefix("eval_"))
        return MetricLabel(f"held-out {twin.title}", twin.unit)
    return MetricLabel(name.replace("_", " "))


def titled(name: str) -> str:
    """A metric's name in words, safe to draw."""
    return visible(label_of(name).title)


def format_metric(name: str, value: float | None) -> str:
    """A metric's value with its unit."""
    unit = label_of(name).unit
    if unit == "bytes":
        return size(value)
    if unit == "share" and value is not None and math.isfinite(value):
        return f"{100 * value:.1f}".removesuffix(".0") + " %"
    return brief(value) if unit == "seconds" else number(value)
