"""Groups without signal give their place to earlier ones: what is trained on, by which ratio, what is told, and after a resume."""

from __future__ import annotations

import os

import pytest
import torch

from engine.figures import size
from engine.run.rollouts import read_group
from engine.run.store import RunFolder
from engine.trainers.zero_advantage import GroupTrainer
from tests.caches import own_cache
from tests.engine.trainers.building import apart
from tests.engine.trainers.conftest import CONVERSATIONS, lines
from tests.engine.trainers.test_grpo import GRPO, LORA, curve, same_after_a_resume
from tests.engine.trainers.test_ranks import through_ranks
from tests.engine.trainers.test_zero_advantage import built, of_batch

# Answers to the first prompts are told apart, those to all others get nothing.
EARLY = """
import zlib


def early(completions, answer):
    texts = [messages[-1]["content"] for messages in completions]
    numbers = [int(each.split()[0]) - 1 for each in answer]
    return [zlib.crc32(text.encode()) % 7 / 7 if number < 6 else 0.0 for text, number in zip(texts, numbers, strict=True)]
"""
REPLAY = {"method.replay_buffer_size": 4}


def sample(made, prompts):
    """The batches of one sampling of these prompts, rows that are even being told apart."""
    trainer = made.trainer
    torch.manual_seed(5)
    trainer._step, trainer._buffered_inputs = 0, None
    trainer._prepare_inputs([made.rows[row] for row in prompts for _ in range(8)])
    return trainer._buffered_inputs


@pytest.fixture
def make(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    made = []

    def make(settings):
        made.append(built(tmp_path, {**REPLAY, **settings}))
        trainer = made[-1].trainer
        stops = [*trainer.eos_token_ids, *range(40, 60)]  # so that answers are of different lengths
        trainer.eos_token_ids = trainer.generation_kwargs["eos_token_id"] = stops
        trainer.generation_config.eos_token_id = stops
        return made[-1]

    yield make
    for each in made:
        each.trainer.rewards.close()


def by_hand(made, batches, old_of, gave, most=2.0):
    """The clipped loss over all tokens of a sampling, from plain logits, and how many answers are replayed. `old_of` is what
    ratios are taken to, by row and answer, the model itself where it has nothing; what `gave` knows is weighed by these."""
    total, tokens, replayed = 0.0, 0, 0
    for batch in batches:
        for place in range(len(batch["row"])):
            prompt = batch["prompt_ids"][place][batch["prompt_mask"][place].bool()].tolist()
            answer = batch["completion_ids"][place][: batch["length"][place]].tolist()
            name = batch["row"][place].item(), tuple(answer)
            new = made.logps(prompt, answer)
            old = old_of.get(name, new.detach())
            advantage = batch["advantages"][place]
            if name in gave:
                replayed += 1
                advantage = advantage * (old - gave[name]).exp().clamp(max=most)
            ratio = (new - old).exp()
            total = total - torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum()
            tokens += len(answer)
    return total / tokens, replayed


def all_logps(made, batches):
    """What the model gives each answer of these batches, by row and answer."""
    found = {}
    for batch in batches:
        for place, row in enumerate(batch["row"].tolist()):
            prompt = batch["prompt_ids"][place][batch["prompt_mask"][place].bool()].tolist()
            answer = batch["completion_ids"][place][: batch["length"][place]].tolist()
            found[row, tuple(answer)] = made.logps(prompt, answer)
    return found


NEW = {"optim.per_device_train_batch_size": 16, "optim.gradient_accumulation_steps": 1}
OLD = {"method.steps_per_generation": 2, "method.num_iterations": 2, **LORA}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(NEW, id="always new"),
        pytest.param(OLD, id="answers that grow old, in torn groups"),
        pytest.param({**NEW, "method.replay_recompute_logps": False}, id="always new, ratios to the first model"),
        pytest.param({**OLD, "method.replay_recompute_logps": False}, id="old, ratios to the first model"),
    ],
)
def test_a_replayed_token_weighs_by_how_much_likelier_it_is_than_to_the_model_that_gave_it(make, settings):
    """The weights move before the replay, and where answers grow old behind it too."""
    made = make(settings)
    trainer = made.trainer
    first = sample(made, (0, 2))
    assert "replayed" not in first[0]  # there was nothing to replay
    gave, old_of = {}, {}
    with torch.no_grad():
        for group in trainer.replay.groups:
            for which in range(8):
                answer = group.of(which, group.ids).tolist()
                logps = made.logps(group.prompt_ids.tolist(), answer)
                kept = group.of(which, group.logps).double()
                assert torch.allclose(kept, logps, atol=1e-5) or not group.advantages[which]
                gave[group.row, tuple(answer)] = logps
    made.move()
    batches = sample(made, (0, 1))  # row 0 is told apart, row 1 is not
    rows = torch.cat([batch["row"] for batch in batches]).tolist()
    replayed = torch.cat([batch["replayed"] for batch in batches]).tolist()
    assert sum(replayed) == 8
    assert {row for row, again in zip(rows, replayed, strict=True) if not again} == {0}
    assert len({batch["length"].sum().item() for batch in (*first, *batches)}) > 1
    assert all(batch["num_items_in_batch"] == sum(each["length"].sum() for each in batches) for batch in batches)
    assert ("old_per_token_logps" in batches[0]) is ("method.num_iterations" in settings)
    if "method.num_iterations" in settings:
        with torch.no_grad():
            old_of = all_logps(made, batches)
        made.move()
    if settings.get("method.replay_recompute_logps") is False:
        old_of |= gave
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    ours, gradients = 0.0, {}
    for batch in batches:
        batch["advantages"] = batch["advantages"].double()
        made.seen = []
        loss, found, _, _ = of_batch(made, batch)
        ours += loss
        gradients = {name: part + gradients.get(name, 0) for name, part in found.items()}
    made.model.zero_grad()
    loss, count = by_hand(made, batches, old_of, gave)
    loss.backward()
    theirs = {name: each.grad for name, each in made.model.named_parameters() if each.grad is not None}
    assert count == 8
    assert ours == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    assert apart(gradients, theirs) < 1e-4


def test_a_replayed_answer_is_weighed_whole_where_ratios_are_of_whole_answers(make):
    made = make({**NEW, "method.importance_sampling_level": "sequence", "method.replay_max_weight": 1.1})
    trainer, seen = made.trainer, []
    sample(made, (0, 2))
    made.move()
    (batch,) = sample(made, (0, 1))
    batch["advantages"], made.seen = batch["advantages"].double(), []
    theirs = type(trainer)._weigh
    trainer._weigh = lambda given: (theirs(trainer, given), seen.append(given))
    of_batch(made, batch)
    (given,) = seen
    now = all_logps(made, [batch])
    for place, again in enumerate(batch["replayed"].tolist()):
        length = batch["length"][place]
        name = batch["row"][place].item(), tuple(batch["completion_ids"][place][:length].tolist())
        weight = (now[name] - batch["replayed_logps"][place][:length]).mean().exp().clamp(max=1.1) if again else 1.0
        assert given["advantages"][place, 0].item() == pytest.approx(
            float(batch["advantages"][place] * weight), rel=1e-4
        )


def test_a_bad_replayed_answer_is_left_out_where_the_model_is_far_from_the_one_that_gave_it(make):
    """Its ratio is taken to the model of now, from which no answer is far."""
    made = make(NEW)
    sample(made, (0, 2))
    made.move()
    (batch,) = sample(made, (0, 1))
    now, bad, made.seen = all_logps(made, [batch]), {}, []
    for place in torch.nonzero(batch["replayed"] & (batch["advantages"] < 0)).flatten().tolist():
        length = batch["length"][place]
        name = batch["row"][place].item(), tuple(batch["completion_ids"][place][:length].tolist())
        bad[place] = (batch["replayed_logps"][place][:length] - now[name]).mean().item()
    bound = sorted(bad.values())[len(bad) // 2 - 1 :][:2]
    bound = sum(bound) / 2
    far = [place for place, apart_by in bad.items() if apart_by > bound]
    assert bound > 0
    assert 0 < len(far) < len(bad)
    found, _, _, _ = of_batch(made, batch, off_policy_mask_threshold=bound)
    batch["advantages"][far] = 0
    wanted, _, _, _ = of_batch(made, batch, off_policy_mask_threshold=None)
    assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("whole", [False, True], ids=["a weight a token", "a weight an answer"])
def test_answers_of_another_sampler_are_kept_with_its_log_probabilities_and_replayed_without_a_weight(
    make, whole, monkeypatch
):
    """TRL's names where something else samples: its log-probabilities, and how much likelier an answer is by the weights of now."""

    def sampled_elsewhere(self, output):
        like = output["completion_mask"].float()
        output["old_per_token_logps"] = -3.0 * like
        output["sampling_per_token_logps"] = -4.0 * like
        output["importance_sampling_ratio"] = like[:, :1] * 0.5 if whole else like * 0.5
        return output

    made = make({"optim.per_device_train_batch_size": 16, "optim.gradient_accumulation_steps": 1})
    monkeypatch.setattr(GroupTrainer, "_with_advantages", sampled_elsewhere)
    sample(made, (0, 2))
    assert all((group.logps == -4).all() for group in made.trainer.replay.groups)
    (batch,) = sample(made, (0, 1))
    again, mask = batch["replayed"], batch["completion_mask"].bool()
    assert again.sum() == 8
    for name in ("replayed_logps", "sampling_per_token_logps"):
        assert (batch[name][again][mask[again]] == -4).all()
    assert (batch["old_per_token_logps"][~again][mask[~again]] == -3).all()
    assert not (batch["old_per_token_logps"][again][mask[again]] == -4).any()  # computed by the weights of now
    weight = batch["importance_sampling_ratio"].expand(mask.shape)
    assert (weight[again][mask[again]] == 1).all()
    assert (weight[~again][mask[~again]] == 0.5).all()


# Only two rows of 48 are told apart, and they come first.
RARE = {
    **GRPO, "method.num_generations": 4, "method.rollout_groups": 4, "data.shuffle": False, "optim.max_steps": 4,
    "optim.gradient_accumulation_steps": 1, "optim.per_device_train_batch_size": 16, "optim.learning_rate": 1e-4,
}  # fmt: skip


def rare(folder, source, **settings):
    (folder / "early.py").write_text(EARLY)
    return {
        **RARE, "method.reward_funcs": [f"{folder}/early.py:early"], "data.train": [{"path": source(CONVERSATIONS)}],
        **settings,
    }  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="here"),
        *(
            pytest.param(
                {"model.dtype": "bfloat16", **each},
                id=" ".join(["on a card", *map(str, each.values())]),
                marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
            )
            for each in ({}, {"kernels.torch_compile": True})
        ),
    ],
)
def test_a_run_mostly_without_signal_learns_from_what_it_had_and_its_rewards_are_those_of_new_answers(
    train, source, tmp_path, settings
):
    """From the second step's last two groups on no group is told apart."""
    settings = rare(tmp_path, source, **settings)
    without = train(settings)
    run = train({**settings, **REPLAY})
    assert curve(without, "grad_norm")[2:] == [0, 0]
    assert all(norm > 0 for norm in curve(run, "grad_norm"))
    # until something is replayed it is the same run
    assert curve(run, "loss")[0] == pytest.approx(
        curve(without, "loss")[0], abs=1e-6 if settings.get("model.dtype") else 0
    )
    share = curve(run, "replay/share")
    assert share[0] == 0 < share[1]
    assert share[2:] == [1, 1]
    assert all(1 <= age <= 3 for age in curve(run, "replay/age"))
    assert curve(run, "replay/kept") == [4, 4, 4, 4]
    assert curve(run, "frac_reward_zero_std")[2:] == [1, 1]
    events = lines(run, "rollout")
    again = [event for event in events if "replayed_from" in event]
    fresh = [event for event in events if "replayed_from" not in event]
    for step, told in enumerate(curve(run, "reward"), 1):
        assert told == pytest.approx(sum(event["reward"] for event in fresh if event["step"] == step) / 4, abs=1e-6)
    assert curve(run, "reward")[2:] == [0, 0]
    assert len(again) == sum(share) * 4
    for event in again:
        first = next(each for each in fresh if (each["step"], each["row"]) == (event["replayed_from"], event["row"]))
        assert read_group(run, event)["completions"] == read_group(run, first)["completions"]
        assert event["row"] < 6
        assert event["replayed_from"] < event["step"]
    detail = next(each for each in lines(run, "receipt")[0]["entries"] if each["feature"] == "loss")["detail"]
    # 4 groups: a prompt of up to 128 tokens, and of 4 answers of 8 tokens ids and log-probabilities, of four bytes each
    most = 4 * 4 * (128 + 4 * 8 * 2)
    assert (
        "best 4 of the last 10 steps, with old log-probabilities by the present model, and weights to the one" in detail
    )
    assert f"that gave them of at most 2 (ids and log-probabilities: at most {size(most)} of main memory" in detail
    assert 4 * 4 * 4 * 8 < curve(run, "replay/bytes")[-1] < most


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"method.reroll_start_fraction": 0.3, "method.reroll_max_tries": 1}, id="prompts come back too"),
        pytest.param(
            {"method.kind": "gdpo", "method.beta": 0.1, "method.steps_per_generation": 2, "method.num_iterations": 2, **LORA},
            id="gdpo held to a reference, in the middle of a sampling",
        ),
    ],
)  # fmt: skip
def test_resuming_equals_never_stopping(train, source, tmp_path, settings):
    settings = rare(tmp_path, source, **REPLAY, **settings)
    if settings["method.kind"] == "gdpo":
        settings["method.reward_funcs"] = [*settings["method.reward_funcs"], "0.5 * length:40"]
    whole = same_after_a_resume(train, settings, tmp_path)
    shares = {event["step"]: event["replay/share"] for event in lines(whole, "metrics", 0) if "replay/share" in event}
    assert max(share for step, share in shares.items() if step > 3) > 0


TWO = {"optim.per_device_train_batch_size": 12, "method.steps_per_generation": 1}


def _rank(rank: int, folder: str) -> None:
    """One of two processes, of three groups of eight answers: the second group lies on both. Two samplings, the model moved
    between them."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", WORKBENCH_CACHE=f"{folder}/cache-{rank}")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    (own := RunFolder(f"{folder}/{rank}").path).mkdir()
    made = built(own, {**REPLAY, **TWO}, ranks=2)
    trainer, made.seen = made.trainer, []
    for groups in ((0, 2, 0), (1, 3, 0)):
        asked = [row for row in groups for _ in range(8)][12 * rank : 12 * (rank + 1)]
        torch.manual_seed(5 + rank)
        trainer._step, trainer._buffered_inputs = 0, None
        before = vars(trainer.replay)["_heap"].copy()
        trainer._prepare_inputs([made.rows[row] for row in asked])
        made.move()
    trainer.rewards.close()
    (batch,) = trainer._buffered_inputs
    batch["advantages"] = batch["advantages"].double()
    trainer.current_gradient_accumulation_steps = 1
    loss, gradients, _, _ = of_batch(made, batch, through_ranks(trainer))
    found = {"before": [(score, number, vars(group)) for score, number, group in before]}
    torch.save({**found, "batch": batch, "loss": loss, "gradients": gradients}, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_hold_the_same_groups_and_take_the_step_of_one(tmp_path, monkeypatch):
    """Also of a group that lies on both, with the weights moved once more behind the sampling. By default
    `test_zero_advantage.py` holds that both keep the same."""
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    torch.multiprocessing.spawn(_rank, (str(tmp_path),), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]
    held = [{number: group for _, number, group in rank["before"]} for rank in ranks]
    assert held[0].keys() == held[1].keys() == {0, 1, 2}
    for number, group in held[0].items():
        assert all(group[name].equal(held[1][number][name]) for name in ("prompt_ids", "ids", "logps"))
    assert [rank["batch"]["replayed"].sum().item() for rank in ranks] == [12, 4]
    rows = torch.cat([rank["batch"]["row"] for rank in ranks]).sort().values
    assert set(rows.tolist()) <= {0, 2}
    made = built(tmp_path, {**REPLAY, **TWO, "optim.per_device_train_batch_size": 24})
    made.trainer.rewards.close()
    made.move(), made.move()
    gave = {
        (group["row"], tuple(answer.tolist())): logps.double()
        for group in held[0].values()
        for answer, logps in zip(
            group["ids"].split(group["lengths"]), group["logps"].split(group["lengths"]), strict=True
        )
    }
    loss, count = by_hand(made, [rank["batch"] for rank in ranks], {}, gave)
    loss.backward()
    assert count == 16
    assert sum(rank["loss"] for rank in ranks) / 2 == pytest.approx(loss.item(), rel=1e-4)
    for rank in ranks:
        assert apart(rank["gradients"], {name: each.grad for name, each in made.model.named_parameters()}) < 1e-4
