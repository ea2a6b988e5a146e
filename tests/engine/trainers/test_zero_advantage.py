"""Answers that teach nothing are left out of the loss's passes: the same gradients from fewer tokens, in every loss."""

from __future__ import annotations

import copy
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.features import fp8_base
from engine.features.built import base_model
from engine.run.curves import NO_DIFFERENCE, no_signal
from engine.run.index import open_view
from engine.run.store import RunFolder
from engine.trainers.reroll import Reroll
from engine.trainers.watching import Watching, _Pace
from engine.trainers.zero_advantage import without_difference
from tests.caches import own_cache
from tests.engine.trainers.building import Built, apart
from tests.engine.trainers.conftest import CONVERSATIONS, lines
from tests.engine.trainers.test_grpo import GRPO, LORA, ROWS, curve, same_after_a_resume
from tests.engine.trainers.test_ranks import through_ranks
from tests.engine.trainers.test_shared_prompts import tokens_of

# Answers to every second prompt get one reward, 0.1: the mean of eight of these is another number.
SOME = """
import zlib


def some(completions, answer):
    texts = [messages[-1]["content"] for messages in completions]
    numbers = [int(each.split()[0]) - 1 for each in answer]
    return [
        0.1 if number % 2 else zlib.crc32(text.encode()) % 7 / 7 for text, number in zip(texts, numbers, strict=True)
    ]
"""
PLAIN = {
    **GRPO, "method.num_generations": 8, "optim.per_device_train_batch_size": 8, "optim.gradient_accumulation_steps": 2,
    "memory.gradient_checkpointing": False,
}  # fmt: skip


def rewarded(folder, settings):
    (folder / "some.py").write_text(SOME)
    rewards = [f"{folder}/some.py:some"]
    rewards += [f"0.5 * {folder}/some.py:some"] if settings.get("method.kind") == "gdpo" else []
    return {**PLAIN, "method.reward_funcs": rewards, **settings}


def built(folder, settings, ranks=1):
    made = Built({**rewarded(folder, settings), "run.devices": ranks}, ROWS, folder, exact_head=True)
    trainer = made.trainer
    trainer.attach(RunFolder(folder), None, 1, {})
    trainer.current_gradient_accumulation_steps = 2
    trainer.model.train()
    return made


def sampled(made, prompts=(0, 1, 2, 3)):
    """The batches of one sampling, every second prompt of which teaches nothing; then the model moves."""
    trainer = made.trainer
    torch.manual_seed(5)
    trainer._step = 0
    trainer._prepare_inputs([made.rows[row] for row in prompts for _ in range(8)])
    trainer.rewards.close()
    made.move()
    return trainer._buffered_inputs


def of_batch(made, batch, model=None, **changed):
    """Loss and gradients of a batch, the curves that it wrote, and the tokens that went through the first layer."""
    trainer = made.trainer
    for name, value in changed.items():
        setattr(trainer, name, value)
    made.model.zero_grad()
    trainer._metrics["train"].clear()
    made.seen.clear()
    loss = trainer.compute_loss(model or made.model, dict(batch))
    loss.backward()
    told = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    return (*made._taken(loss), told, sum(made.seen))


LOSSES = (
    {"loss_type": "dapo"}, {"loss_type": "grpo"}, {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    {"loss_type": "dr_grpo"}, {"loss_type": "bnpo"}, {"loss_type": "cispo", "epsilon_high": 5.0}, {"loss_type": "sapo"},
)  # fmt: skip
USUAL = {"loss_type": "dapo", "importance_sampling_level": "token", "epsilon_high": 0.2}


@pytest.mark.parametrize(
    ("method", "old"),
    [
        pytest.param({}, True, id="grpo, batches of mixed groups and answers that grow old"),
        pytest.param({"method.kind": "gdpo", **LORA}, False, id="gdpo, groups whole"),
    ],
)
def test_every_loss_has_the_same_gradients_from_fewer_tokens(tmp_path, monkeypatch, method, old):
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    settings = {"method.steps_per_generation": 4} if old else {"optim.gradient_accumulation_steps": 1}
    settings |= {} if old else {"optim.per_device_train_batch_size": 32}
    made = built(tmp_path, {**settings, **method})
    made.seen = tokens_of(base_model(made.trainer.model))
    batches = sampled(made)
    assert made.trainer.computes_all == ""
    assert ("old_per_token_logps" in batches[0]) is old
    told = torch.cat([batch["teaches"] for batch in batches])
    assert told.sum() == 16
    saved = total = 0
    for batch in batches:
        batch["advantages"] = batch["advantages"].double()
        taught = batch["row"] % 2 == 0
        assert batch["teaches"].tolist() == taught.tolist()
        assert not batch["advantages"][~taught].any()
        if old:  # those that were not computed then: what the model gave them, before it moved, plays no part
            assert not batch["old_per_token_logps"][~taught].any()
        for loss in LOSSES:
            changed = {**USUAL, **loss}
            ours, left, curves, few = of_batch(made, batch, computes_all="", **changed)
            theirs, whole, all_curves, many = of_batch(made, batch, computes_all="as TRL does", **changed)
            assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-9), loss
            assert apart(left, whole) < 1e-5, loss  # transformers' norms round to float32, at other shapes
            clipped = {name: value for name, value in all_curves.items() if "clip" in name}
            assert {name: curves[name] for name in clipped} == pytest.approx(clipped, nan_ok=True)
            assert "entropy" not in curves
            assert curves["frac_tokens_skipped"] > 0 or taught.all()
        saved, total = saved + few, total + many
    assert 0.2 < saved / total < 0.6


def test_groups_that_are_all_equal_are_counted_by_group_where_rewards_are_scaled_by_the_batch(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    settings = {"method.scale_rewards": "batch", "optim.per_device_train_batch_size": 32}
    made = built(tmp_path, {**settings, "optim.gradient_accumulation_steps": 1})
    sampled(made)
    assert made.trainer._metrics["train"]["frac_reward_zero_std"] == [0.5]


def test_curves_say_what_was_computed(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    made = built(tmp_path, {"optim.per_device_train_batch_size": 32, "optim.gradient_accumulation_steps": 1})
    made.seen = tokens_of(made.trainer.model)
    (batch,) = sampled(made)
    taught = batch["teaches"]
    _, _, told, _ = of_batch(made, batch)
    only = {
        name: part[taught] if isinstance(part, torch.Tensor) and part.dim() and len(part) == 32 else part
        for name, part in batch.items()
    }
    _, _, alone, _ = of_batch(made, only, computes_all="as TRL does")
    assert told["entropy/computed"] == pytest.approx(alone["entropy"], rel=1e-6)
    tokens = batch["prompt_mask"].sum(1) + batch["length"]
    assert told["frac_tokens_skipped"] == pytest.approx((tokens[~taught].sum() / tokens.sum()).item())
    assert told["num_skipped_tokens"] == tokens[~taught].sum()


def test_a_batch_that_teaches_nothing_has_zeros_for_gradients_on_every_weight(tmp_path, monkeypatch):
    """Not none: AdamW's momentum and decay act on a gradient of zero, and on a missing one not."""
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    made = built(tmp_path, {"optim.per_device_train_batch_size": 16, "optim.gradient_accumulation_steps": 1})
    made.seen = tokens_of(made.trainer.model)
    (batch,) = sampled(made, (1, 3))
    assert not batch["teaches"].any()
    loss, gradients, told, tokens = of_batch(made, batch)
    theirs = of_batch(made, batch, computes_all="as TRL does")
    assert loss == theirs[0] == 0
    assert gradients.keys() == theirs[1].keys()
    assert not any(each.any() for each in gradients.values())
    assert tokens == 2
    assert "entropy/computed" not in told
    assert told["frac_tokens_skipped"] == 1


def test_the_share_of_a_cards_peak_counts_no_token_that_was_left_out():
    watching = Watching.__new__(Watching)
    watching._gpu, watching._flop_per_token = SimpleNamespace(peak_flops=1e4), 10.0
    watching._memory, watching._memory_next = {}, float("inf")
    pace = _Pace(400, 100, 200.0, 2.0, 0.1)
    told = [watching._metrics(1, 0.1, {"loss": 0.0, **left}, pace) for left in ({}, {"frac_tokens_skipped": 0.75})]
    assert [each["mfu"] for each in told] == [0.2, 0.05]
    assert [each["tokens_per_second"] for each in told] == [200.0, 200.0], "they are sampled"


def test_groups_alike_by_every_reward():
    same = torch.tensor([[0.1, 1.0], [0.1, 1.0], [0.1, 2.0], [0.1, 1.0], [0.1, torch.nan], [0.1, 3.0]])
    assert without_difference(same, 2).tolist() == [True, False, True]
    assert without_difference(same[:, :1], 3).tolist() == [True, True]
    assert without_difference(torch.full((2, 1), torch.nan), 2).tolist() == [True]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"method.beta": 0.1}, "computed too: method.beta holds each to the reference"),
        ({"method.skip_zero_advantage": False}, "computed too: method.skip_zero_advantage is off"),
        ({}, "left out of the loss's passes"),
    ],
)
def test_the_receipt_says_whether_and_why(tmp_path, monkeypatch, settings, reason):
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    made = built(tmp_path, settings)
    made.trainer.rewards.close()
    assert f"answers with an advantage of 0 are {reason}" in made.trainer.receipt_note()


def test_a_run_counts_what_it_leaves_out_and_resumes_to_the_bit(train, source, tmp_path):
    """In the second pass over a buffer that some of what teaches nothing is in."""
    settings = {**LORA, "method.steps_per_generation": 4, "method.num_iterations": 2}
    settings = rewarded(tmp_path, settings) | {"data.train": [{"path": source(CONVERSATIONS)}]}
    same_after_a_resume(train, settings, tmp_path)
    run = train({**settings, "optim.max_steps": 2, "method.rollout_groups": 8})
    shares, counts = curve(run, "frac_tokens_skipped"), curve(run, "num_skipped_tokens")
    assert all(0 < share < 1 for share in shares)
    assert 0 < counts[0] < counts[1]
    assert "entropy/computed" in lines(run, "metrics")[0]
    loss = next(entry for entry in lines(run, "receipt")[0]["entries"] if entry["feature"] == "loss")
    assert "left out of the loss's passes" in loss["detail"]


ON_A_CARD = [
    {}, LORA, {**LORA, "model.quantization": "nf4"}, {**LORA, "model.quantization": "fp8"},
    {**LORA, "kernels.fused_lora": True, "kernels.use_cut_ce": True, "kernels.fused_attn_kernel": True},
    {"kernels.quantization_aware": "fp8"}, {"memory.activation_offloading": "cpu"}, {**LORA, "memory.layer_offloading": True},
    {"kernels.torch_compile": True, "method.skip_zero_advantage": True},
]  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="on the CPU"),
        pytest.param({"memory.activation_offloading": "disk"}, id="on the CPU, kept on disk"),
        *(
            pytest.param(
                {"model.dtype": "bfloat16", **each},
                id=" ".join(["on a card", *map(str, each.values())]),
                marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
            )
            for each in ON_A_CARD
        ),
    ],
)
def test_a_run_whose_answers_all_get_one_reward_learns_nothing_and_computes_nothing(
    train, source, settings, monkeypatch
):
    """In two passes over each sampling, so that log-probabilities are asked for that nothing needs."""
    monkeypatch.setattr(fp8_base, "LEAST_NUMBERS", 0)
    settings = {"method.num_iterations": 2, "optim.max_steps": 2, "optim.weight_decay": 0.0, **settings}
    run = train(
        {**GRPO, **settings, "method.reward_funcs": ["regex:^"], "data.train": [{"path": source(CONVERSATIONS)}]}
    )
    assert curve(run, "frac_tokens_skipped") == [1, 1]
    assert curve(run, "grad_norm") == curve(run, "loss") == [0, 0]
    assert curve(run, "reward") == [1]  # one sampling
    with open_view(run) as watch:
        assert no_signal(watch.view.method, watch.view.series).startswith(NO_DIFFERENCE)


def _rank(rank: int, folder: str) -> None:
    """One of two processes; all that the second one samples teaches nothing."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", WORKBENCH_CACHE=f"{folder}/cache-{rank}")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    (own := RunFolder(f"{folder}/{rank}").path).mkdir()
    settings = {
        "optim.per_device_train_batch_size": 16,
        "method.steps_per_generation": 1,
        "method.replay_buffer_size": 4,
    }
    made = built(own, settings, ranks=2)
    made.seen = tokens_of(made.trainer.model)
    (batch,) = sampled(made, (0, 2) if rank == 0 else (1, 3))
    found: dict[str, Any] = {"teaches": batch["teaches"].tolist()}
    wrapped = through_ranks(made.trainer)
    for name, reason in (("left", ""), ("all", "as TRL does")):
        for _ in range(2):  # DistributedDataParallel complains late
            found[name] = of_batch(made, batch, wrapped, computes_all=reason)
    failed = Reroll(0, 1, 4)
    failed.keep([{"row": 10 * rank + place} for place in range(3)], 3 * rank, [True, False, True], 2)
    found["failed"] = [row["row"] for row in failed.waiting]
    found["kept"] = sorted(
        (group.row, group.ids.tolist(), group.logps.tolist()) for group in made.trainer.replay.groups
    )
    torch.save(copy.deepcopy(found), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_a_process_without_a_row_keeps_step_with_the_others(tmp_path):
    torch.multiprocessing.spawn(_rank, (str(tmp_path),), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]
    assert [set(rank["teaches"]) for rank in ranks] == [{True}, {False}]
    assert [rank["failed"] for rank in ranks] == [
        [0, 11],
        [0, 11],
    ]  # one group is begun by the first and ends on the other
    assert ranks[0]["kept"] == ranks[1]["kept"]  # what may be replayed, all of it from the first
    assert [row for row, _, _ in ranks[0]["kept"]] == [0, 2]
    for rank in ranks:
        assert apart(rank["left"][1], rank["all"][1]) < 1e-5
        assert rank["left"][2]["entropy/computed"] == ranks[0]["left"][2]["entropy/computed"]
        assert 0 < rank["left"][2]["frac_tokens_skipped"] < 1
    assert ranks[1]["left"][3] == 2 < ranks[1]["all"][3]
    assert ranks[0]["left"][3] == ranks[0]["all"][3]
