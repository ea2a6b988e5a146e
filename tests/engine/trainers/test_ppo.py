"""PPO through the worker and by itself: losses and advantages by the book, the value head beside the model, exact resume."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from engine.run.rollouts import read_group
from engine.run.store import RunFolder
from engine.trainers.ppo import gae, token_rewards
from tests.caches import own_cache
from tests.engine.trainers.building import Built, apart
from tests.engine.trainers.conftest import CONVERSATIONS, lines
from tests.engine.trainers.test_grpo import GRPO, LORA, ROWS, curve, ids_of, same_after_a_resume

PPO = {name: value for name, value in GRPO.items() if name != "method.num_generations"} | {"method.kind": "ppo"}


def test_the_reward_rises_and_the_value_head_learns(train, source):
    settings = {**PPO, "data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 24, "method.beta": 0.0}
    settings |= {"optim.per_device_train_batch_size": 32, "optim.gradient_accumulation_steps": 1}
    run = train({**settings, "method.value_learning_rate": 0.02, "method.num_iterations": 1, "run.save_steps": 24})
    rewards = curve(run, "objective/scores")
    assert sum(rewards[-4:]) / 4 > rewards[0] + 0.2
    assert {"loss/policy_avg", "loss/value_avg", "objective/kl", "policy/approxkl_avg"} <= set(lines(run, "metrics")[0])
    # the advantages that are shown are those of PPO: one answer a prompt has one all the same
    group = read_group(run, lines(run, "rollout")[0])
    assert len(group["completions"]) == 1
    assert group["completions"][0]["advantage"] != 0
    weights = load_file(run.checkpoints / "checkpoint-24/model.safetensors")
    assert not [name for name in weights if "value_head" in name]
    head = torch.load(run.checkpoints / "checkpoint-24/parts-0.pt", weights_only=True)["value_head"]
    assert head["weight"].abs().max() > 0


@pytest.mark.parametrize(
    "adapter", [pytest.param({}, id="full weights, with a copy", marks=pytest.mark.slow), pytest.param(LORA, id="lora")]
)
def test_resuming_in_the_middle_of_a_buffer_equals_never_stopping(train, source, tmp_path, adapter):
    settings = {**PPO, **adapter, "method.steps_per_generation": 4, "method.num_iterations": 2}
    same_after_a_resume(train, {**settings, "data.train": [{"path": source(CONVERSATIONS)}]}, tmp_path)


def test_advantages_are_the_sums_of_the_paper() -> None:
    """arXiv:1506.02438, equation 11: sums of discounted errors, written out for each token."""
    torch.manual_seed(0)
    lengths, gamma, lam = [5, 1, 3], 0.9, 0.8
    mask = torch.tensor([[float(place < length) for place in range(5)] for length in lengths], dtype=torch.float64)
    values, penalty = (torch.randn(3, 5, dtype=torch.float64) for _ in range(2))
    scores = torch.tensor([1.0, -2.0, 0.5])
    rewards = token_rewards(scores, penalty, mask)
    found, returns = gae(rewards, values, mask, gamma, lam)
    for row, length in enumerate(lengths):
        earned = [-penalty[row, place].item() for place in range(length)]
        earned[-1] += scores[row].item()
        assert rewards[row, :length].tolist() == pytest.approx(earned)
        later = [*values[row, 1:length].tolist(), 0.0]
        errors = [earned[place] + gamma * later[place] - values[row, place].item() for place in range(length)]
        for place in range(length):
            wanted = sum((gamma * lam) ** (at - place) * errors[at] for at in range(place, length))
            assert found[row, place].item() == pytest.approx(wanted)
            assert returns[row, place].item() == pytest.approx(wanted + values[row, place].item())
        assert found[row, length:].abs().sum() == 0


def plain_loss(built, trainer, batch, tokens):
    """arXiv:1707.06347 with its value clipped too, one token at a time; the hidden states by transformers' own output.

    With it what each token adds to the curves, by their names.
    """
    total, curves = torch.zeros((), dtype=torch.float64), {}
    for place in range(4):
        prompt, answer = ids_of(batch, place)
        ours = built.logps(prompt, answer)
        base = built.model.get_base_model() if hasattr(built.model, "peft_config") else built.model
        states = base.base_model(input_ids=torch.tensor([[*prompt, *answer]])).last_hidden_state[0]
        values = trainer.head(states[len(prompt) - 1 : -1].to(trainer.head.weight.dtype))[:, 0]
        spread = (
            built.model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        )
        for at in range(len(answer)):
            advantage, target = batch["advantages"][place, at], batch["returns"][place, at]
            before, old = batch["old_values"][place, at], batch["old_per_token_logps"][place, at]
            ratio = (ours[at] - old).exp()
            policy = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            held = torch.minimum(torch.maximum(values[at], before - 0.2), before + 0.2)
            value = 0.5 * torch.maximum((values[at] - target) ** 2, (held - target) ** 2)
            total = total + policy + 0.1 * value
            told = {
                "loss/policy_avg": policy, "loss/value_avg": value, "policy/approxkl_avg": 0.5 * (ours[at] - old) ** 2,
                "policy/clipfrac_avg": policy > -ratio * advantage,
                "val/clipfrac_avg": value > 0.5 * (values[at] - target) ** 2,
                "policy/entropy_avg": -(spread[at].exp() * spread[at]).sum(), "val/ratio": ratio,
            }  # fmt: skip
            for name, number in told.items():
                curves.setdefault(name, []).append(float(number))
    return total / tokens, curves


def norms_in_float64(model):
    """transformers rounds inside its norms to float32, so the gradients of two losses would not add up exactly."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = lambda states, norm=module: (
                norm.weight * states * torch.rsqrt(states.square().mean(-1, keepdim=True) + norm.variance_epsilon)
            )


@pytest.mark.parametrize(
    ("adapter", "exact_head", "near"),
    [pytest.param({}, False, 1e-6, id="full"), pytest.param(LORA, True, 1e-10, id="lora", marks=pytest.mark.slow)],
)
def test_gradients_equal_plain_torch(tmp_path, monkeypatch, adapter, exact_head, near):
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    settings = {**PPO, **adapter, "method.steps_per_generation": 4, "optim.per_device_train_batch_size": 4}
    built = Built(settings, ROWS * 4, tmp_path, exact_head=exact_head)
    trainer = built.trainer
    trainer.attach(RunFolder(tmp_path), None, 1, {})
    trainer.current_gradient_accumulation_steps = 2
    if exact_head:
        norms_in_float64(built.model)
    torch.nn.init.normal_(trainer.head.weight, std=0.3)
    trainer.model.train()
    trainer._prepare_inputs([built.prepared.dataset[place] for place in range(16)])
    trainer.rewards.close()
    kl, penalty, entropy = (
        trainer._metrics["train"][f"objective/{name}"][-1] for name in ("kl", "non_score_reward", "entropy")
    )
    # as TRL's PPO had it: of whole answers, by the probabilities of the tokens that were sampled
    sampled = [ids_of(batch, place) for batch in trainer._buffered_inputs for place in range(4)]
    assert entropy == pytest.approx(-sum(built.logps(*each).sum().item() for each in sampled) / 16, rel=1e-5)
    assert penalty == pytest.approx(-trainer.beta * kl)
    batch = {name: part.double() if part.is_floating_point() else part for name, part in
             trainer._buffered_inputs[0].items()}  # fmt: skip
    built.move()
    built.model.zero_grad()
    loss = trainer.compute_loss(built.model, dict(batch))
    loss.backward()
    value, ours = built._taken(loss)
    built.model.zero_grad()
    # two of the four batches that were sampled together make a step
    expected, curves = plain_loss(built, trainer, batch, batch["num_items_in_batch"] * 2 / 4)
    expected.backward()
    wanted, theirs = built._taken(expected)
    assert kl != 0  # `Built` moved the model from its reference
    assert any("value_head" in name for name in ours)
    assert value == pytest.approx(wanted, rel=100 * near)
    assert apart(ours, theirs) <= near
    found = {name: trainer._metrics["train"][name][-1] for name in curves}
    assert found == pytest.approx({name: sum(each) / len(each) for name, each in curves.items()}, rel=1e-5, abs=1e-8)
    assert found["policy/clipfrac_avg"] > 0
    assert found["val/clipfrac_avg"] > 0


def test_the_value_head_learns_at_its_own_rate_and_does_not_decay(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    rates = {"optim.learning_rate": 1e-5, "optim.weight_decay": 0.5, "method.value_learning_rate": 0.25}
    trainer = Built({**PPO, **rates}, ROWS * 4, tmp_path).trainer
    trainer.rewards.close()
    torch.nn.init.ones_(trainer.head.weight)
    torch.nn.init.zeros_(trainer.head.bias)
    trainer.create_optimizer()
    trainer.head.weight.grad = torch.zeros_like(trainer.head.weight)
    trainer.head.bias.grad = torch.ones_like(trainer.head.bias)
    trainer.optimizer.step()
    assert (trainer.head.weight == 1).all()
    assert trainer.head.bias.item() == pytest.approx(-0.25)  # AdamW's first step is as long as its rate


def test_the_divergence_is_taken_off_the_reward_token_by_token(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    settings = {**PPO, "method.steps_per_generation": 4, "optim.per_device_train_batch_size": 4, "method.beta": 0.5}
    built = Built({**settings, "method.gamma": 1.0, "method.lam": 1.0}, ROWS * 4, tmp_path)
    trainer = built.trainer
    trainer.attach(RunFolder(tmp_path), None, 1, {})
    trainer.model.train()
    trainer._prepare_inputs([built.prepared.dataset[place] for place in range(16)])
    trainer.rewards.close()
    for batch in trainer._buffered_inputs:
        for place in range(4):
            prompt, answer = ids_of(batch, place)
            with torch.no_grad():
                away = built.logps(prompt, answer) - built.logps(prompt, answer, reference=True)
            text = trainer.processing_class.decode(answer, skip_special_tokens=True)
            score = float(not any(letter.isdigit() for letter in text)) + 0.5 * min(1.0, max(0.0, 2 - len(answer) / 4))
            # with both at 1 a return is all that is still to come
            wanted = [score - 0.5 * away[at:].sum().item() for at in range(len(answer))]
            assert batch["returns"][place][: len(answer)].tolist() == pytest.approx(wanted, abs=1e-4)


def test_an_answer_that_no_reward_applies_to_teaches_neither_policy_nor_value_head(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    (tmp_path / "some.py").write_text(
        "def some(completions):\n"
        "    return [None if place % 3 == 0 else place / 7 - 1 for place, _ in enumerate(completions)]\n"
    )
    settings = {**PPO, "method.steps_per_generation": 4, "optim.per_device_train_batch_size": 4}
    built = Built({**settings, "method.reward_funcs": [f"{tmp_path}/some.py:some"]}, ROWS * 4, tmp_path)
    trainer = built.trainer
    trainer.attach(RunFolder(tmp_path), None, 1, {})
    torch.nn.init.normal_(trainer.head.weight, std=0.3)
    trainer.model.train()
    trainer._prepare_inputs([built.prepared.dataset[place] for place in range(16)])
    trainer.rewards.close()
    applies = trainer._scores.isfinite().any(1)
    assert applies.sum() == 10
    assert trainer._metrics["train"]["objective/scores"][-1] == pytest.approx(
        trainer._scores.nanmean().item(), rel=1e-5
    )
    judged, weighed = [], []
    for batch in trainer._buffered_inputs:
        for place in range(4):
            mask, advantage = batch["completion_mask"][place].bool(), batch["advantages"][place]
            own = batch["returns"][place] == batch["old_values"][place]
            judged.append(bool(own[mask].all()) and not advantage.any())
            weighed += advantage[mask].tolist() if not judged[-1] else []
    # the buffer is shuffled: as many answers as no reward applies to are without any signal, and no other
    assert sum(judged) == 6
    assert sum(weighed) / len(weighed) == pytest.approx(0, abs=1e-5)
    assert sum(each**2 for each in weighed) / len(weighed) == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_a_mixture_of_experts_that_reports_its_routers_samples_and_learns(train, source, tmp_path, kind):
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    from engine.builtin import tiny

    sizes = {"vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
    more = {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **more, output_router_logits=True)).save_pretrained(tmp_path / "moe")
    AutoTokenizer.from_pretrained(tiny.folder()).save_pretrained(tmp_path / "moe")
    settings = {
        "model.name": str(tmp_path / "moe"),
        "method.kind": kind,
        "method.reward_funcs": ["regex:e"],
        "method.num_generations": 4,
        "method.max_completion_length": 6,
        "data.train": [{"path": source(CONVERSATIONS)}],
        "optim.max_steps": 2,
    }
    run = train(settings)
    assert [event["step"] for event in lines(run, "metrics")] == [1, 2]
    assert all(event["loss"] is not None for event in lines(run, "metrics"))
