"""Samplings that are asked for ahead of their turn: the same answers, old ones weighed as TRL does, exact resumes."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch

from engine.rewards.scoring import Rewards
from engine.trainers.async_rollouts import Ahead, AheadTrainer
from tests.engine.trainers.conftest import CONVERSATIONS, lines, resumed_from
from tests.engine.trainers.test_grpo import GRPO, LORA, curve, same_after_a_resume
from tests.engine.trainers.test_reroll import settings_of

AHEAD = {**GRPO, **LORA, "method.async_prefetch": "rewards", "method.rollout_groups": 8, "optim.max_steps": 5}


def asked(run):
    """The texts of all answers by step and group."""
    from engine.run.rollouts import read_group

    return {
        (event["step"], event["group"]): (
            event["row"],
            [each["text"] for each in read_group(run, event)["completions"]],
        )
        for event in lines(run, "rollout")
    }


@pytest.fixture
def by_the_same_seeds(monkeypatch):
    """Has samplings draw, when their turn comes, by the seeds that they would draw by were they asked for ahead."""
    plain, numbers = AheadTrainer._generate_single_turn, iter(range(100))

    def seeded(trainer, *args, **kwargs):
        if trainer.ahead is not None:
            return plain(trainer, *args, **kwargs)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(Ahead._seed_of(_Seed(trainer.args.seed), (0, next(numbers))))
            return plain(trainer, *args, **kwargs)

    monkeypatch.setattr(AheadTrainer, "_generate_single_turn", seeded)


class _Seed:
    def __init__(self, seed):
        self._seed = seed


def test_with_weights_that_stay_everything_is_as_when_it_is_made_in_turn(train, source, by_the_same_seeds):
    """Answers to the letter; losses but for the rounding of a pass more, since each answer is as likely as it was."""
    frozen = {"data.train": [{"path": source(CONVERSATIONS)}], "optim.learning_rate": 1e-30, "optim.max_steps": 4}
    frozen |= {"method.kind": "gdpo"}
    in_turn = train({**AHEAD, **frozen, "method.async_prefetch": "none"})
    ahead = train({**AHEAD, **frozen, "method.prefetch_depth": 2})
    assert len(asked(in_turn)) == 16
    assert asked(ahead) == asked(in_turn)
    for name in ("reward", "rewards/regex/mean", "frac_reward_zero_std", "loss", "grad_norm"):
        assert curve(ahead, name) == pytest.approx(curve(in_turn, name), rel=1e-4, abs=1e-6), name
    assert curve(ahead, "prefetch/age") == [0, 1, 2, 2]
    assert curve(ahead, "sampling/importance_sampling_ratio/mean") == [1, 1, 1, 1]
    assert curve(ahead, "prefetch/above_cap") == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "mode",
    [
        "sequence_mask",
        pytest.param("token_truncate", marks=pytest.mark.slow),
        pytest.param("token_mask", marks=pytest.mark.slow),
        pytest.param("sequence_truncate", marks=pytest.mark.slow),
    ],
)
def test_old_answers_are_weighed_by_how_much_likelier_they_are_now(train, source, monkeypatch, mode):
    """Written out, and that the loss is weighed by it: with a bound near 0 nothing is learned, or next to nothing."""
    made = []
    score = AheadTrainer._generate_and_score_completions

    def kept(trainer, inputs):
        made.append(score(trainer, inputs))
        return made[-1]

    monkeypatch.setattr(AheadTrainer, "_generate_and_score_completions", kept)
    settings = {**AHEAD, "data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 3}
    settings |= {"method.importance_sampling_mode": mode}
    cap = 1.2
    run = train({**settings, "method.importance_sampling_cap": cap})
    above = []
    for output in made:
        mask = output["completion_mask"]
        apart = (output["old_per_token_logps"] - output["sampling_per_token_logps"]) * mask
        ratio = apart.sum(1, keepdim=True).exp() if mode.startswith("sequence") else apart.exp()
        met = (ratio > cap) & (mask.any(1, keepdim=True) if mode.startswith("sequence") else mask.bool())
        above.append((met.sum() / (len(mask) if mode.startswith("sequence") else mask.sum())).item())
        wanted = ratio.clamp(max=cap) if mode.endswith("truncate") else ratio.masked_fill(ratio > cap, 0)
        assert torch.allclose(output["importance_sampling_ratio"], wanted)
    assert curve(run, "prefetch/above_cap") == pytest.approx(above)
    assert above[0] == 0
    assert max(above) > 0
    nothing = train({**settings, "method.importance_sampling_cap": 1e-30})
    assert max(map(abs, curve(nothing, "loss"))) < 1e-20
    assert max(map(abs, curve(run, "loss"))) > 1e-3


def test_bad_answers_that_the_model_moved_away_from_are_left_out(train, source):
    settings = {**AHEAD, "data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 3}
    settings |= {"method.importance_sampling_mode": "token_truncate"}
    run, all_learn = (train({**settings, **more}) for more in ({"method.off_policy_mask_threshold": 0.01}, {}))
    kept, whole = curve(run, "loss"), curve(all_learn, "loss")
    assert kept[0] == whole[0]
    assert kept[1] < whole[1]  # without the bad ones the mean is of good ones, whose loss is below 0
    said = next(entry for entry in lines(run, "receipt")[0]["entries"] if entry["feature"] == "loss")["detail"]
    assert "bad answers that diverge by more than 0.01 are left out" in said


PATIENT = """
import pathlib, time

calls = []


def patient(completions):
    calls.append(1)
    # The first rows, then the first sampling; each later one waits for a step that is made with the answers before it.
    while len(calls) > 2 and not pathlib.Path(__file__).with_name(f"step-{len(calls) - 2}").exists():
        time.sleep(0.01)
    return [float(len(messages[-1]["content"]) % 3) for messages in completions]
"""


def test_reward_functions_compute_while_the_model_trains(train, source, tmp_path, monkeypatch):
    """Each waits here for a step that is made with the answers before its own: one that is asked before that step would wait in
    vain. They are asked by another thread, once for each answer, and about what the loss then learns from."""
    (tmp_path / "patient.py").write_text(PATIENT)
    threads, one, step = [], Rewards.one, AheadTrainer.training_step

    def noted(rewards, *args):
        threads.append(threading.current_thread() is threading.main_thread())
        return one(rewards, *args)

    def stepped(trainer, *args, **kwargs):
        (tmp_path / f"step-{trainer.state.global_step + 1}").touch()
        return step(trainer, *args, **kwargs)

    monkeypatch.setattr(Rewards, "one", noted)
    monkeypatch.setattr(AheadTrainer, "training_step", stepped)
    settings = {**AHEAD, "data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 4}
    settings |= {"method.reward_funcs": [f"{tmp_path}/patient.py:patient"], "method.reward_timeout": 20.0}
    # A checkpoint waits for what is under way, which is a step too early here.
    run = train({**settings, "run.save_steps": 50})
    assert threads == [True] + [False] * 4  # the first call is that of the first rows, before training
    texts = [text for _, texts in asked(run).values() for text in texts]
    assert sum(len(text) % 3 for text in texts) / len(texts) == pytest.approx(sum(curve(run, "reward")) / 4)


def test_a_reward_that_fails_meanwhile_ends_the_run_with_its_name(train, source, tmp_path):
    (tmp_path / "late.py").write_text(
        "calls = []\n\ndef late(completions):\n    calls.append(1)\n"
        "    if len(calls) > 3:\n        raise KeyError('gone')\n    return [float(len(calls))] * len(completions)\n"
    )
    settings = {**AHEAD, "data.train": [{"path": source(CONVERSATIONS)}]}
    run = train({**settings, "method.reward_funcs": [f"{tmp_path}/late.py:late"]}, code=1)
    message = lines(run, "failed")[0]["message"]
    assert message.startswith("method.reward_funcs: late.py:late raised KeyError")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rewards")]


@pytest.mark.parametrize(
    "settings",
    [
        {"method.prefetch_depth": 2},
        pytest.param(
            {"method.steps_per_generation": 4, "method.num_iterations": 2, "method.beta": 0.1, "adapter.kind": "none"},
            marks=pytest.mark.slow,
        ),
        pytest.param({"method.num_generations": 8, "rows": 6, "method.prefetch_depth": 3}, marks=pytest.mark.slow),
    ],
    ids=["two ahead", "full weights, in the second pass over a buffer", "over the ends of epochs"],
)
def test_resuming_equals_never_stopping(train, source, tmp_path, settings):
    settings = dict(settings)
    rows = {"path": source(CONVERSATIONS[: settings.pop("rows", 48)])}
    if settings.get("adapter.kind") == "none":
        settings["adapter.r"] = None
    made = {name: value for name, value in {**AHEAD, **settings}.items() if value is not None}
    same_after_a_resume(train, {**made, "data.train": [rows]}, tmp_path)


@pytest.mark.slow
def test_failed_prompts_come_back_the_same_ones_after_a_resume(train, source, tmp_path):
    settings = {**settings_of(tmp_path, source), **LORA, "method.async_prefetch": "rewards"}
    same_after_a_resume(train, settings, tmp_path)


def test_a_run_that_goes_on_with_other_rows_is_asked_these_at_once(train, source, tmp_path):
    """What a checkpoint holds of the rows of before is left, though it was made already."""
    path = source(CONVERSATIONS)
    settings = {**AHEAD, "data.train": [{"path": path}], "optim.max_steps": 4, "run.save_steps": 3}
    run = resumed_from(train({**settings, "method.prefetch_depth": 2}), 3, tmp_path / "again")
    rows = [[{**message, "content": f"So: {message['content']}"} for message in each] for each in CONVERSATIONS[:16]]
    Path(path).write_text("".join(json.dumps({"messages": each}) + "\n" for each in rows))
    run.update_json(accept_data=True)
    train(folder=run)
    prompts = [event["prompt"] for event in lines(run, "rollout", 1)]
    assert prompts
    assert all("So: " in each for each in prompts)
