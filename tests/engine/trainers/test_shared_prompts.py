"""A prompt computed once for all its answers: the same gradients, the same answers, and fewer tokens through the model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3Config

from engine.features.built import base_model
from engine.run.store import RunFolder
from engine.trainers.shared_prompts import answers_per_prompt, is_worth_a_pass
from tests.caches import own_cache
from tests.engine.trainers.building import Built, apart
from tests.engine.trainers.test_grpo import GRPO, LORA, ROWS

ONE_BATCH = {
    "optim.per_device_train_batch_size": 16,
    "optim.gradient_accumulation_steps": 1,
    "method.beta": 0.1,
    "memory.gradient_checkpointing": False,
}
PPO = {**GRPO, "method.kind": "ppo"}


def tokens_of(model):
    """Counts the tokens that go through the first layer from now on."""
    seen = []
    model.base_model.layers[0].register_forward_hook(
        lambda layer, args, kwargs, out: seen.append((args[0] if args else kwargs["hidden_states"]).shape[:2].numel()),
        with_kwargs=True,
    )
    return seen


@pytest.mark.parametrize(
    ("method", "adapter"),
    [
        pytest.param(GRPO, LORA, id="grpo-lora"),
        pytest.param(PPO, {}, id="ppo-full"),
        pytest.param(GRPO, {}, id="grpo-full", marks=pytest.mark.slow),
        pytest.param(PPO, LORA, id="ppo-lora", marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_the_plain_pass_from_fewer_tokens(tmp_path, monkeypatch, method, adapter):
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    built = Built({**method, **adapter, **ONE_BATCH, "method.num_generations": 4}, ROWS, tmp_path, exact_head=True)
    trainer = built.trainer
    assert trainer.shares_prompts
    assert "a prompt is computed once for all its answers in sampling and in the loss" in trainer.receipt_note()
    trainer.attach(RunFolder(tmp_path), None, 1, {})
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    batch = dict(trainer._prepare_inputs([row for row in built.rows for _ in range(4)]))
    trainer.rewards.close()
    batch["advantages"] = torch.linspace(-1, 1, batch["advantages"].numel()).view(batch["advantages"].shape).double()
    seen = tokens_of(base_model(trainer.model))
    found = []
    for shares in (True, False):
        trainer.shares_prompts = shares
        built.model.zero_grad()
        loss = trainer.compute_loss(built.model, dict(batch))
        loss.backward()
        found.append((*built._taken(loss), sum(seen)))
        seen.clear()
    (ours, shared, few), (plain, alone, many) = found
    assert ours == pytest.approx(plain, rel=1e-6)
    # transformers rounds to float32 inside its norms, at other shapes
    assert apart(shared, alone) < 1e-5
    prompts, answers = batch["prompt_ids"].shape[1], batch["completion_ids"].shape[1]
    assert many == 16 * (prompts + answers)
    assert few == 4 * (prompts - 1) + 16 * (1 + answers)


def test_the_same_answers_are_sampled(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    built = Built({**GRPO, **ONE_BATCH}, ROWS, tmp_path)
    trainer = built.trainer
    trainer.attach(RunFolder(tmp_path), None, 1, {})
    trainer.model.train()
    seen = tokens_of(trainer.model)
    prompts = [list(row["prompt_ids"]) for row in built.rows for _ in range(4)]
    found = []
    for shares in (True, False):
        trainer.shares_prompts = shares
        torch.manual_seed(5)
        found.append((trainer._generate_single_turn(prompts, None, {}, 4)[0], seen[0]))
        seen.clear()
    trainer.rewards.close()
    (ours, few), (plain, many) = found
    assert ours == plain
    assert len({tuple(answer) for answer in ours}) > 8
    assert many == 4 * (few + 4)  # each prompt once instead of four times, and without its last token
    assert "generate" not in vars(trainer.model)


def test_a_group_that_ends_on_another_rank_is_sampled_without_sharing(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    built = Built({**GRPO, **ONE_BATCH}, ROWS, tmp_path)
    trainer = built.trainer
    trainer.rewards.close()
    trainer.model.train()
    seen = tokens_of(trainer.model)
    prompts = [list(built.rows[row]["prompt_ids"]) for row in (0, 0, 0, 0, 1, 1)]
    assert len(trainer._generate_single_turn(prompts, None, {}, 4)[0]) == 6
    assert seen[0] == 6 * max(map(len, prompts))


@pytest.mark.parametrize(
    "settings",
    [{"memory.gradient_checkpointing": True}, {"memory.activation_offloading": "cpu"}],
    ids=["checkpointing", "offloading"],
)
def test_what_cannot_share_does_not(tmp_path, monkeypatch, settings):
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    built = Built({**GRPO, **ONE_BATCH, **settings}, ROWS, tmp_path)
    built.trainer.rewards.close()
    assert not built.trainer.shares_prompts
    assert "computed once" not in built.trainer.receipt_note()


def test_a_sampling_for_several_batches_tears_groups_apart_and_the_receipt_says_what_is_left(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    several = {"optim.per_device_train_batch_size": 8, "optim.gradient_accumulation_steps": 2}
    trainer = Built({**GRPO, **ONE_BATCH, **several, "method.num_generations": 4}, ROWS, tmp_path).trainer
    assert "in sampling" in trainer.receipt_note()
    assert "in the loss" not in trainer.receipt_note()
    trainer.attach(RunFolder(tmp_path), None, 1, {})
    trainer.model.train()
    torch.manual_seed(0)
    batch = trainer._prepare_inputs([row for row in trainer.train_dataset.select(range(4)) for _ in range(4)])
    trainer.rewards.close()
    assert len(batch["row"]) == 8
    assert answers_per_prompt(batch["prompt_ids"], batch["prompt_mask"]) == 1


def test_prompts_are_shared_only_where_each_has_as_many_answers():
    prompts = torch.tensor([[0, 1], [0, 1], [1, 2], [1, 2]])
    seen = torch.ones_like(prompts)
    assert answers_per_prompt(prompts, seen) == 2
    assert answers_per_prompt(prompts[:3], seen[:3]) == 1
    assert answers_per_prompt(prompts[[0, 2, 1, 3]], seen) == 1
    seen[1, 0] = 0
    assert answers_per_prompt(prompts, seen) == 1


def test_a_card_shares_prompts_that_earn_a_pass_more() -> None:
    """A pass is worth what it spares the card, and costs what the host takes to launch it."""
    small = Qwen3Config(
        hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8, head_dim=128
    )
    large = Qwen3Config(hidden_size=4096, intermediate_size=12_288, num_attention_heads=32, num_key_value_heads=8)

    def shares(config: Qwen3Config, prompt: int, device: str = "cuda") -> bool:
        return is_worth_a_pass(SimpleNamespace(config=config, device=torch.device(device)), 16, prompt, 8)

    assert [shares(small, prompt) for prompt in (25, 500, 2000)] == [False, False, True]
    assert [shares(large, prompt) for prompt in (25, 500, 2000)] == [False, True, True]
    assert shares(small, 25, "cpu")
