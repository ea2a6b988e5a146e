"""GRPO through the worker: the reward rises, groups are kept, and a resume in the middle of a buffer is exact."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from engine.config.facts import DataFacts, Facts
from engine.config.files import as_yaml, parse
from engine.facts.counts import batches_per_epoch
from engine.rules import read
from engine.run.rollouts import read_group
from engine.run.store import RunFolder
from engine.trainers.rollouts import EpochSampler, tried
from tests.caches import own_cache
from tests.engine.rewards.test_scoring import Letters, row
from tests.engine.trainers.building import Built, apart
from tests.engine.trainers.conftest import CONVERSATIONS, lines, resumed_from

ROWS = [{"messages": messages} for messages in CONVERSATIONS[:4]]
LORA = {"adapter.kind": "lora", "adapter.r": 4}
GRPO = {
    "method.kind": "grpo",
    "method.reward_funcs": [r"regex:^\D*$", "0.5 * length:4"],
    "method.num_generations": 4,
    "method.max_completion_length": 8,
    "optim.per_device_train_batch_size": 8,
    "optim.learning_rate": 1e-2,
}


def curve(run, name, segment=None):
    return [event[name] for event in lines(run, "metrics", segment) if name in event]


def test_the_reward_rises_and_every_group_is_kept_whole(train, source):
    settings = {**GRPO, "data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 12}
    settings |= {"optim.per_device_train_batch_size": 32, "optim.gradient_accumulation_steps": 1}
    run = train({**settings, "method.rollout_groups": 2})
    rewards = curve(run, "reward")
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2
    assert {"rewards/regex/mean", "rewards/length/std", "frac_reward_zero_std", "completions/clipped_ratio"} <= set(
        lines(run, "metrics")[0]
    )
    told = lines(run, "rollout")
    assert [(event["step"], event["group"]) for event in told] == [(s, g) for s in range(1, 13) for g in (0, 1)]
    group = read_group(run, told[0])
    assert group["prompt"] == CONVERSATIONS[group["row"]][0]["content"]
    assert group["answer"] == CONVERSATIONS[group["row"]][1]["content"]
    assert len(group["completions"]) == 4
    for answer in group["completions"]:
        assert answer["reward"] == pytest.approx(answer["rewards"]["regex"] + 0.5 * answer["rewards"]["length"])
        assert answer["rewards"]["regex"] == float(not any(letter.isdigit() for letter in answer["text"]))
        assert answer["cut_off"] == (answer["tokens"] == 8)
    assert sum(answer["advantage"] for answer in group["completions"]) == pytest.approx(0, abs=1e-5)


def test_rewards_in_another_order_teach_nothing(train, source, tmp_path):
    """The control of the test above: the same rewards, dealt to other answers; what they were for does not become likelier."""
    (tmp_path / "dealt.py").write_text(
        "import random\n"
        "draw = random.Random(0)\n"
        "def dealt(completions, completion_ids):\n"
        "    texts = [messages[-1]['content'] for messages in completions]\n"
        "    found = [float(not any(letter.isdigit() for letter in text)) for text in texts]\n"
        "    draw.shuffle(found)\n"
        "    return found\n"
    )
    settings = {**GRPO, "data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 12}
    settings |= {"optim.per_device_train_batch_size": 32, "optim.gradient_accumulation_steps": 1}
    run = train({**settings, "method.reward_funcs": [f"{tmp_path}/dealt.py:dealt"]})
    rewards = curve(run, "reward")
    assert abs(sum(rewards[-3:]) - sum(rewards[:3])) / 3 < 0.2


def test_rewards_that_apply_to_no_answer_end_the_run_before_its_first_step(train, source, tmp_path):
    (tmp_path / "none.py").write_text("def none(completions):\n    return [None for _ in completions]\n")
    settings = {**GRPO, "data.train": [{"path": source(CONVERSATIONS)}]}
    run = train({**settings, "method.reward_funcs": [f"{tmp_path}/none.py:none"]}, code=1)
    message = lines(run, "failed")[0]["message"]
    assert message.startswith("method.reward_funcs: none of the rewards applies to any of the 16 answers")
    assert "0 for an answer that is bad" in message
    assert not lines(run, "metrics")
    said = next(entry for entry in lines(run, "receipt")[0]["entries"] if entry["feature"] == "loss")["detail"]
    assert "own answers: none it applies to" in said


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(
            {"method.steps_per_generation": 4, "method.beta": 0.1},
            id="full weights, in a buffer, with a copy",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {**LORA, "method.steps_per_generation": 4, "method.num_iterations": 2, "method.beta": 0.1},
            id="LoRA, in the second pass over a buffer",
        ),
        pytest.param(
            {"method.num_generations": 8, "data.train.rows": 6}, id="over the ends of epochs", marks=pytest.mark.slow
        ),
    ],
)
def test_resuming_equals_never_stopping(train, source, tmp_path, settings):
    settings = dict(settings)
    rows = {"path": source(CONVERSATIONS[: settings.pop("data.train.rows", 48)])}
    same_after_a_resume(train, {**GRPO, **settings, "data.train": [rows]}, tmp_path)


def same_after_a_resume(train, settings, tmp_path):
    """Six steps, and the same taken up after the third: numbers and weights to the bit. Gives the first run."""
    whole = train({**settings, "optim.max_steps": 6, "run.save_steps": 3})
    again = train(folder=resumed_from(whole, 3, tmp_path / "again"))

    def told(run, segment):
        told_later = ("step_time", "seconds", "per_second", "memory")  # of the clock and the machine
        return {
            event["step"]: {
                name: value
                for name, value in event.items()
                if name not in ("seq", "t", "segment") and not any(word in name for word in told_later)
            }
            for event in lines(run, "metrics", segment)
            if event["step"] > 3
        }

    assert lines(again, "started", 1)[0]["resumed_from_step"] == 3
    assert sorted(told(whole, 0)) == [4, 5, 6]
    assert told(again, 1) == told(whole, 0)
    name = "adapter_model.safetensors" if settings.get("adapter.kind") == "lora" else "model.safetensors"
    first, second = (load_file(run.checkpoints / "checkpoint-6" / name) for run in (whole, again))
    assert first.keys() == second.keys()
    assert all(first[key].equal(second[key]) for key in first)
    return whole


def test_a_resume_with_other_batches_samples_anew(train, source, tmp_path):
    """What was sampled is split as the run was set before, and lacks what the reference says: it would end by an IndexError,
    divide by the tokens of another sampling, or end by a KeyError."""
    settings = {**GRPO, **LORA, "optim.gradient_accumulation_steps": 1, "method.steps_per_generation": 4}
    settings |= {"data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 5, "run.save_steps": 3}
    run = train(settings)
    assert [event["step"] for event in lines(run, "metrics") if "reward" in event] == [1, 5]
    for changed in ({"steps_per_generation": 8}, {"beta": 0.1}):
        again = resumed_from(run, 3, tmp_path / next(iter(changed)))
        mapping = parse(again.config.read_text()).mapping
        again.config.write_text(as_yaml({**mapping, "method": {**mapping["method"], **changed}}))
        train(folder=again)
        told = lines(again, "metrics", 1)
        assert [("reward" in event, "kl" in event) for event in told] == [
            (True, "beta" in changed),
            (False, "beta" in changed),
        ]


# -- the loss ----------------------------------------------------------------------------------------------------------
def sampled(built, tmp_path):
    """One buffer of 16 answers to 4 prompts, with the log-probabilities they were sampled with; then the model moves."""
    trainer = built.trainer
    trainer.attach(RunFolder(tmp_path), None, 1, {})
    trainer.current_gradient_accumulation_steps = 2
    trainer.model.train()
    trainer._prepare_inputs([row for row in built.rows for _ in range(4)])
    before = [built.logps(*ids_of(batch, place)).detach() for batch in trainer._buffered_inputs for place in range(4)]
    old = [batch["old_per_token_logps"][place] for batch in trainer._buffered_inputs for place in range(4)]
    assert all(
        torch.allclose(ours.float(), theirs[: len(ours)].float(), atol=1e-5)
        for ours, theirs in zip(before, old, strict=True)
    )
    built.move()
    return trainer._buffered_inputs


@pytest.mark.parametrize("sampled", [{}, {"method.num_iterations": 2}, {"method.steps_per_generation": 4}])
def test_an_epoch_has_as_many_batches_as_the_estimate_counts(tmp_path, monkeypatch, sampled):
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    built = Built({**GRPO, **sampled}, ROWS * 5, tmp_path)
    built.trainer.rewards.close()
    facts = Facts(data=DataFacts(rows=len(ROWS) * 5))
    assert len(built.trainer.get_train_dataloader()) == batches_per_epoch(built.config, facts)


def test_each_epoch_has_an_order_of_its_own_however_often_it_is_begun():
    sampler = EpochSampler(range(12), mini_repeat_count=2, batch_size=4, repeat_count=1, shuffle=True, seed=7)

    def order(epoch):
        sampler.set_epoch(epoch)
        return list(sampler)

    first, second = order(0), order(1)
    assert first != second
    assert sorted(first) == sorted(second) == sorted([*range(12), *range(12)])
    assert [order(1), order(0)] == [second, first]


def ids_of(batch, place):
    prompt = batch["prompt_ids"][place][batch["prompt_mask"][place].bool()].tolist()
    return prompt, batch["completion_ids"][place][batch["completion_mask"][place].bool()].tolist()


def advantages_of(built, batches):
    """By (batch, place), from the texts alone: a reward's distance from its group's mean by the group's spread."""
    decode, rewards = built.trainer.processing_class.decode, {}
    for number, batch in enumerate(batches):
        for place in range(4):
            text = decode(ids_of(batch, place)[1], skip_special_tokens=True)
            tokens = len(ids_of(batch, place)[1])
            reward = float(not any(letter.isdigit() for letter in text)) + 0.5 * min(1.0, max(0.0, 2 - tokens / 4))
            rewards.setdefault(batch["row"][place].item(), {})[number, place] = reward
    found = {}
    for group in rewards.values():
        values = torch.tensor(list(group.values()))
        assert len(values) == 4
        found |= {key: (value - values.mean()) / (values.std() + 1e-4) for key, value in group.items()}
    return found


def plain_loss(built, batch, advantages, loss_type, sequence, high):
    """The objective of each loss written out, one answer at a time on full logits."""
    answers, weights = [], []
    for place in range(4):
        prompt, answer = ids_of(batch, place)
        ours, reference = built.logps(prompt, answer), built.logps(prompt, answer, reference=True)
        log_ratio = ours - batch["old_per_token_logps"][place][: len(answer)]
        ratio = log_ratio.mean().expand_as(ours).exp() if sequence else log_ratio.exp()
        advantage = advantages[place]
        if loss_type == "cispo":
            each = -ratio.clamp(max=high).detach() * advantage * ours
        elif loss_type == "sapo":
            tau = 1.0 if advantage > 0 else 1.05
            each = -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantage
        else:
            each = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1 + high) * advantage)
        away = reference - ours
        each = each + 0.1 * (away.exp() - away - 1) * ratio  # arXiv:2512.02556
        answers.append(each)
        weights.append(len(answer))
    total = torch.stack([each.sum() for each in answers]).sum()
    if loss_type in ("grpo", "sapo"):
        return torch.stack([each.mean() for each in answers]).mean() / 2
    if loss_type == "bnpo":
        return total / sum(weights) / 2
    if loss_type == "dr_grpo":
        return total / (4 * 8) / 2
    # All answers sampled together, of which two of four batches make a step.
    return total / (batch["num_items_in_batch"] * 2 / 4)


@pytest.mark.parametrize(
    ("adapter", "exact_head", "near"),
    [pytest.param({}, False, 1e-6, id="full", marks=pytest.mark.slow), pytest.param(LORA, True, 1e-10, id="lora")],
)
def test_gradients_of_every_loss_equal_plain_torch(tmp_path, monkeypatch, adapter, exact_head, near):
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    settings = {**GRPO, **adapter, "method.steps_per_generation": 4, "method.beta": 0.1}
    built = Built({**settings, "optim.per_device_train_batch_size": 4}, ROWS, tmp_path, exact_head=exact_head)
    batches = sampled(built, tmp_path)
    advantages = advantages_of(built, batches)
    # the batch of these whose answers differ most
    number = max(range(4), key=lambda at: sum(abs(advantages[at, place]) for place in range(4)))
    batch, trainer = batches[number], built.trainer
    mine = [advantages[number, place].double() for place in range(4)]
    assert batch["advantages"].tolist() == pytest.approx([float(each) for each in mine], abs=1e-5)
    batch["advantages"] = torch.stack(mine)
    clipped = 0.0
    for loss_type, sequence, high in (
        ("dapo", False, 0.2), ("grpo", False, 0.28), ("grpo", True, 0.2), ("dr_grpo", False, 0.2),
        ("bnpo", False, 0.2), ("cispo", False, 5.0), ("sapo", False, 0.2),
    ):  # fmt: skip
        trainer.loss_type, trainer.epsilon_high = loss_type, high
        trainer.importance_sampling_level = "sequence" if sequence else "token"
        built.model.zero_grad()
        trainer._metrics["train"].clear()
        loss = trainer.compute_loss(built.model, dict(batch))
        loss.backward()
        clipped += sum(trainer._metrics["train"].get("clip_ratio/region_mean", []))
        value, ours = built._taken(loss)
        built.model.zero_grad()
        expected = plain_loss(built, batch, mine, loss_type, sequence, high)
        expected.backward()
        wanted, theirs = built._taken(expected)
        # TRL holds the temperatures of sapo in float32.
        bound = max(near, 1e-7) if loss_type == "sapo" else near
        assert value == pytest.approx(wanted, rel=100 * bound), loss_type
        assert apart(ours, theirs) <= bound, loss_type
    assert clipped > 0
    trainer.rewards.close()


# -- what goes wrong ---------------------------------------------------------------------------------------------------
def test_a_reward_that_fails_ends_the_run_before_training_in_one_sentence(train, source, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def score(completions):\n    return [1 / len(each[0]['content']) for each in completions]\n"
    )
    settings = {**GRPO, "method.reward_funcs": [f"{tmp_path}/mine.py:score"]}
    run = train({**settings, "data.train": [{"path": source(CONVERSATIONS)}]}, code=1)
    (failed,) = lines(run, "failed")
    assert failed["message"].startswith("method.reward_funcs: mine.py:score raised ZeroDivisionError")
    assert "(row 0 of the data)" in failed["message"]
    assert not lines(run, "started")
    assert not list(run.checkpoints.glob("checkpoint-*"))


def test_a_reward_that_fails_in_the_middle_names_the_row(train, source, tmp_path):
    (tmp_path / "mine.py").write_text(
        "calls = []\ndef score(completions):\n    calls.append(1)\n"
        "    return [float('nan') if len(calls) > 3 else 1.0 for _ in completions]\n"
    )
    settings = {**GRPO, "method.reward_funcs": [f"{tmp_path}/mine.py:score"], "run.save_steps": 1}
    run = train({**settings, "data.train": [{"path": source(CONVERSATIONS)}]}, code=1)
    (failed,) = lines(run, "failed")
    assert "mine.py:score must return finite numbers; got nan (row " in failed["message"]
    assert {path.name for path in run.checkpoints.glob("checkpoint-*")} == {"checkpoint-1", "checkpoint-2"}


def test_the_receipt_names_rewards_and_reference(train, source):
    settings = {
        **GRPO,
        **LORA,
        "method.beta": 0.1,
        "optim.max_steps": 1,
        "data.train": [{"path": source(CONVERSATIONS)}],
    }
    told = next(entry for entry in lines(train(settings), "receipt")[0]["entries"] if entry["feature"] == "loss")
    assert told["effective"] == "GRPOTrainer"
    assert "regex x 1 (first rows' own answers: 0.00)" in told["detail"]
    assert "reference: adapter off" in told["detail"]


def test_rows_that_hold_no_answer_are_not_said_to_have_got_a_reward():
    config = read({"method": {"kind": "grpo", "reward_funcs": ["regex:[aeiou]", "2 * length:4"]}}).config
    for columns, told in (
        ({}, "rewards: regex x 1, length x 2 (the first rows hold no answers to try them on)"),
        ({"answer": "aha!"}, "regex x 1 (first rows' own answers: 1.00), length x 2 (first rows' own answers: 1.00)"),
    ):
        rewards, said = tried(config, [row(0, "a", **columns)], Letters())
        rewards.close()
        assert told in said


def test_answers_that_were_cut_off_are_read_also_where_nothing_is_learned_from_them(train, source):
    settings = {**GRPO, "method.mask_truncated_completions": True, "method.max_completion_length": 3}
    run = train({**settings, "optim.max_steps": 3, "data.train": [{"path": source(CONVERSATIONS)}]})
    assert max(curve(run, "completions/clipped_ratio")) > 0.5
    assert curve(run, "tokens") == curve(run, "num_tokens")
    assert curve(run, "trained_tokens")[-1] < 3 * 16


def test_real_questions_are_asked_and_their_own_answers_score(train, shared_data):
    data = {"data.train": [{"path": str(shared_data / "gsm8k/train_1000.jsonl"), "rows": 60}], "data.max_length": 200}
    settings = {**GRPO, **data, "data.excess_length": "drop", "method.reward_funcs": ["gsm8k", "length:4"]}
    settings |= {"optim.per_device_train_batch_size": 32, "optim.gradient_accumulation_steps": 1, "optim.max_steps": 12}
    run = train(settings)
    told = next(entry for entry in lines(run, "receipt")[0]["entries"] if entry["feature"] == "loss")
    assert "gsm8k x 1 (first rows' own answers: 1.00)" in told["detail"]
    short = curve(run, "rewards/length/mean")
    assert sum(short[-3:]) > sum(short[:3]) + 0.3


def test_held_out_prompts_are_answered_and_scored_and_leave_no_trace_in_the_training(train, source):
    settings = {**GRPO, "data.train": [{"path": source(CONVERSATIONS[:40])}], "optim.gradient_accumulation_steps": 1}
    settings |= {"optim.max_steps": 3}
    run = train({**settings, "data.eval": [{"path": source(CONVERSATIONS[40:])}], "run.eval_steps": 1})
    assert len(curve(run, "eval_reward")) == 3
    assert all(0 <= value <= 1.5 for value in curve(run, "eval_reward"))
    plain = train(settings)
    assert curve(run, "reward") == curve(plain, "reward")
    assert curve(run, "grad_norm") == curve(plain, "grad_norm")
    assert max(curve(plain, "grad_norm")) > 0
