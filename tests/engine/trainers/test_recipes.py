"""Every recipe is whole: it checks, trains, logs its method's own curves, and shows samples or groups as it goes.

The model is the built-in one, or a small mixture of experts, the rows few and the steps two; all else is as the recipe says.
"""

from __future__ import annotations

import math

import pytest
from transformers import AutoTokenizer

from engine.builtin import tiny
from engine.config.files import put
from engine.config.method import METHODS
from engine.config.recipes import recipe_mapping, recipes
from engine.config.tree import fields
from engine.data.gather_facts import gather_facts
from engine.rules import read
from engine.run.curves import LEADING, label_of, leading, ordered
from engine.run.rollouts import read_group
from tests.engine.features.families import made
from tests.engine.trainers.conftest import CONVERSATIONS, PAIRS, RATED, STEPS, TAUGHT, TEXTS, lines

QUESTIONS = [{"question": f"What is {number} and 1?", "answer": f"#### {number + 1}"} for number in range(48)]
TEXT = [{"text": f"What comes after {number}? {number + 1} comes after {number}."} for number in range(48)]
ROWS = {
    "sft": CONVERSATIONS, "pretrain": TEXT, "dpo": PAIRS, "ipo": PAIRS, "simpo": PAIRS, "orpo": PAIRS, "kto": RATED,
    "reward": PAIRS, "prm": STEPS, "embedding": TEXTS, "distill": TAUGHT, "grpo": QUESTIONS, "gdpo": QUESTIONS,
    "ppo": QUESTIONS,
}  # fmt: skip
PAIR_CURVES = ("rewards/margins", "rewards/accuracies", "rewards/chosen", "rewards/rejected", "logps/chosen", "loss")
SCORE_CURVES = ("accuracy", "margin", "mean_reward", "loss")
GROUP_CURVES = (
    "reward", "reward_std", "rewards/gsm8k/mean", "frac_reward_zero_std", "completions/mean_length",
    "completions/clipped_ratio", "entropy/computed", "frac_tokens_skipped", "clip_ratio/region_mean", "loss",
)  # fmt: skip
CURVES = {
    "sft": ("loss", "eval_loss", "mean_token_accuracy", "entropy"),
    "pretrain": ("loss", "eval_loss", "mean_token_accuracy", "entropy"),
    **dict.fromkeys(("dpo", "ipo", "simpo"), PAIR_CURVES),
    "orpo": (*PAIR_CURVES, "nll_loss", "log_odds_ratio"),
    "kto": ("rewards/margins", "rewards/chosen", "rewards/rejected", "kl", "loss"),
    "reward": SCORE_CURVES,
    "prm": ("accuracy", "loss"),
    "embedding": ("eval_recall@1", "eval_recall@10", "accuracy", "loss"),
    "distill": ("loss", "eval_loss", "mean_token_accuracy", "kl", "entropy"),
    "grpo": GROUP_CURVES,
    "gdpo": GROUP_CURVES,
    "ppo": (
        "reward", "objective/kl", "objective/scores", "objective/entropy", "loss/value_avg", "loss/policy_avg",
        "policy/clipfrac_avg", "completions/mean_length",
    ),
}  # fmt: skip
"""The curves that somebody who knows the method looks for."""


def method_of(name):
    return (recipe_mapping(name).get("method") or {}).get("kind", fields.method.kind.default)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A folder of a small mixture of experts with the built-in model's tokenizer."""
    folder, tokenizer = tmp_path_factory.mktemp("mixture"), AutoTokenizer.from_pretrained(tiny.folder())
    made(
        "qwen3_moe", vocab_size=len(tokenizer), moe_intermediate_size=128, max_position_embeddings=512
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def on_few_rows(name, source, mixture):
    """The recipe's settings by path, on a small model, these rows and two steps."""
    mapping, method = recipe_mapping(name), method_of(name)
    given = {
        f"{part}.{key}": value for part, values in mapping.items() if part != "version" for key, value in values.items()
    }
    rows = ROWS[method]
    small = {
        "model.name": str(mixture) if "adapter.target_parameters" in given else "builtin/tiny", "model.dtype": "float32", "data.train": [{"path": source(rows)}],
        "data.eval": [{"path": source(rows[:16])}], "data.max_length": 128, "optim.gradient_accumulation_steps": 1,
        "optim.max_steps": 2, "run.eval_steps": 1, "run.save_steps": 2,
    }  # fmt: skip
    if METHODS[method].rows == "prompts":
        small["method.max_completion_length"] = 8
    if METHODS[method].head == "vocabulary":
        small |= {"run.prompts": ["What comes after 7?"], "run.prompts_steps": 1, "run.max_new_tokens": 4}
    return {key: value for key, value in (given | small).items() if key != "optim.num_train_epochs"}


def test_each_method_has_a_recipe_of_its_own():
    assert {method_of(each.name) for each in recipes()} == set(METHODS) == set(CURVES) == set(LEADING)


@pytest.mark.slow
@pytest.mark.parametrize("name", [each.name for each in recipes()])
def test_a_recipe_checks_trains_and_shows_its_methods_curves(train, source, mixture, tmp_path, name):
    method, settings = method_of(name), on_few_rows(name, source, mixture)
    mapping = {"version": 1}
    for path, value in settings.items():
        put(mapping, path, value)
    facts = gather_facts(read(mapping).config, tmp_path)
    assert [finding.message for finding in read(mapping, facts).findings if finding.severity == "error"] == []
    run = train(settings)
    told = lines(run, "metrics")
    assert [event["step"] for event in told if "loss" in event] == [1, 2]
    assert all(math.isfinite(event[key]) for event in told for key in ("loss", "eval_loss") if key in event)
    names = {key for event in told for key in event}
    assert set(CURVES[method]) <= names
    first, own = leading(method, names)[:3], {curve for group in LEADING[method] for curve in group}
    assert all(curve in own or "rewards/*/mean" in own for group in first for curve in group)
    assert all(label_of(curve).title for curve in ordered(method, names))
    samples = {event["step"] for event in lines(run, "sample")}
    assert samples == ({0, 1, 2} if METHODS[method].head == "vocabulary" else set())
    if METHODS[method].rows == "prompts":
        group = read_group(run, lines(run, "rollout")[0])
        assert {"gsm8k"} <= set(group["completions"][0]["rewards"])
        assert all(math.isfinite(answer["advantage"]) for answer in group["completions"])
