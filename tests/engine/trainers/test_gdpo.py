"""GDPO through the worker: each reward by itself, resume exact, and a small reward that GRPO would let collapse."""

from __future__ import annotations

import pytest
import torch

from engine.run.store import RunFolder
from engine.trainers.gdpo import without_spread
from tests.caches import own_cache
from tests.engine.trainers.building import Built, apart
from tests.engine.trainers.conftest import CONVERSATIONS
from tests.engine.trainers.test_grpo import GRPO, LORA, ROWS, curve, ids_of, plain_loss, same_after_a_resume, sampled

GDPO = {**GRPO, "method.kind": "gdpo"}
# A large reward with a spread of its own that also likes digits, and a small one against them.
AGAINST = """
def texts(completions):
    return [messages[-1]["content"] for messages in completions]


def digit(text):
    return any(letter.isdigit() for letter in text)


def large(completions):
    return [len(text) % 2 + 0.8 * digit(text) for text in texts(completions)]


def small(completions):
    return [0.0 if digit(text) else 0.1 for text in texts(completions)]
"""


@pytest.mark.slow
def test_resuming_in_the_middle_of_a_buffer_equals_never_stopping(train, source, tmp_path):
    settings = {**GDPO, **LORA, "method.steps_per_generation": 4}
    same_after_a_resume(train, {**settings, "data.train": [{"path": source(CONVERSATIONS)}]}, tmp_path)


def test_advantages_are_those_of_each_reward_by_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    built = Built({**GDPO, "method.steps_per_generation": 4, "optim.per_device_train_batch_size": 4}, ROWS, tmp_path)
    trainer = built.trainer
    trainer.attach(RunFolder(tmp_path), None, 1, {})
    trainer.model.train()
    trainer._prepare_inputs([row for row in built.rows for _ in range(4)])
    trainer.rewards.close()
    groups: dict[int, list[tuple[float, float, float]]] = {}
    for batch in trainer._buffered_inputs:
        for place in range(4):
            ids = ids_of(batch, place)[1]
            text = trainer.processing_class.decode(ids, skip_special_tokens=True)
            rewards = float(not any(letter.isdigit() for letter in text)), min(1.0, max(0.0, 2 - len(ids) / 4))
            groups.setdefault(batch["row"][place].item(), []).append((*rewards, batch["advantages"][place].item()))
    expected, ours = [], []
    for group in groups.values():
        values = torch.tensor(group, dtype=torch.float64)
        apart = (values[:, :2] - values[:, :2].mean(0)) / (values[:, :2].std(0) + 1e-4)
        expected.append(apart[:, 0] + 0.5 * apart[:, 1])
        ours.append(values[:, 2])
    total = torch.cat(expected)
    total = (total - total.mean()) / (total.std() + 1e-4)
    assert torch.cat(ours).tolist() == pytest.approx(total.tolist(), abs=1e-5)
    assert total.abs().max() > 0.5


@pytest.mark.parametrize(
    ("adapter", "exact_head", "near"),
    [pytest.param({}, False, 1e-6, id="full", marks=pytest.mark.slow), pytest.param(LORA, True, 1e-10, id="lora")],
)
def test_gradients_equal_plain_torch(tmp_path, monkeypatch, adapter, exact_head, near):
    """With the advantages of the test above; all losses are GRPO's, where each has its test."""
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    settings = {**GDPO, **adapter, "method.steps_per_generation": 4, "method.beta": 0.1}
    built = Built({**settings, "optim.per_device_train_batch_size": 4}, ROWS, tmp_path, exact_head=exact_head)
    batches = sampled(built, tmp_path)
    batch = max(batches, key=lambda each: each["advantages"].abs().sum())
    batch["advantages"] = batch["advantages"].double()
    built.trainer.rewards.close()
    built.model.zero_grad()
    loss = built.trainer.compute_loss(built.model, dict(batch))
    loss.backward()
    value, ours = built._taken(loss)
    built.model.zero_grad()
    expected = plain_loss(built, batch, list(batch["advantages"]), "dapo", False, 0.2)
    expected.backward()
    wanted, theirs = built._taken(expected)
    assert value == pytest.approx(wanted, rel=100 * near)
    assert apart(ours, theirs) <= near


def test_rewards_that_make_up_for_each_other_still_teach():
    """Two rewards with the same total for every answer: nothing for GRPO, something for GDPO."""
    scores = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0]])
    assert scores.sum(1).std() == 0
    assert without_spread(scores, 4) == 0.0
    assert without_spread(torch.tensor([[1.0, 0.5], [1.0, 0.5], [0.0, 1.0], [0.0, 0.0]]), 2) == 0.5
    assert without_spread(torch.tensor([[1.0, torch.nan], [1.0, torch.nan]]), 2) == 1.0


@pytest.mark.slow
def test_a_small_reward_lives_under_gdpo_and_collapses_under_the_sum_of_grpo(train, source, tmp_path):
    (tmp_path / "against.py").write_text(AGAINST)
    found = {}
    for kind in ("grpo", "gdpo"):
        settings = {**GRPO, "method.kind": kind, "data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 18}
        settings |= {"optim.per_device_train_batch_size": 64, "optim.gradient_accumulation_steps": 1}
        settings |= {"method.num_generations": 8, "memory.gradient_checkpointing": False}
        rewards = [f"{tmp_path}/against.py:large", f"{tmp_path}/against.py:small"]
        found[kind] = curve(train({**settings, "method.reward_funcs": rewards}), "rewards/small/mean")
    start = sum(found["grpo"][:2]) / 2
    grpo, gdpo = (sum(found[kind][-4:]) / 4 for kind in ("grpo", "gdpo"))
    assert grpo < 0.6 * start
    assert gdpo > 1.5 * start
