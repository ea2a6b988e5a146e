"""Several processes: one step of theirs is that of one process on all their answers, and a run of two resumes to the bit."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import pytest
import torch
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import Trainer

from engine.config.facts import Facts
from engine.rules import read
from engine.run import launch
from engine.run.from_config import launch_config
from engine.run.rollouts import read_group
from engine.run.store import ENDED, RunFolder
from engine.trainers.rollouts import EpochSampler
from engine.trainers.run_trainer import RunTrainer
from tests.caches import own_cache
from tests.engine.trainers.building import Built, apart
from tests.engine.trainers.conftest import BASE, CONVERSATIONS, lines, resumed_from
from tests.engine.trainers.test_grpo import GRPO, LORA, ROWS
from tests.engine.trainers.test_ppo import norms_in_float64

ONE_BATCH = {"optim.gradient_accumulation_steps": 1, "method.beta": 0.1, "memory.gradient_checkpointing": False}
METHODS = {"grpo": {}, "gdpo": {"method.kind": "gdpo"}, "ppo": {"method.kind": "ppo"}}
ASKED = [row for row in range(4) for _ in range(4)]


def settings_of(method, batch, ranks):
    each = {"optim.per_device_train_batch_size": batch, "run.devices": ranks}
    return {**GRPO, **METHODS[method], **ONE_BATCH, **each}


def built(method, batch, folder, ranks=1):
    made = Built(settings_of(method, batch, ranks), ROWS, folder, exact_head=True)
    trainer = made.trainer
    trainer.attach(RunFolder(folder), None, 1, {})
    trainer.current_gradient_accumulation_steps = 1
    for model in (made.model, made.reference):
        norms_in_float64(model)
    if method == "ppo":
        torch.manual_seed(4)
        torch.nn.init.normal_(trainer.head.weight, std=0.3)
    trainer.model.train()
    return made


def through_ranks(trainer):
    """The model as accelerate would wrap it where there are several processes."""
    unused = trainer.args.ddp_find_unused_parameters is not False
    return DistributedDataParallel(trainer.model, find_unused_parameters=unused)


@pytest.fixture
def alone(tmp_path):
    """A process group of this process only."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("method", ["grpo", "ppo"])
def test_a_shared_prompt_and_a_value_head_are_reduced_once(alone, tmp_path, monkeypatch, method):
    """Both lie outside of the one pass that DistributedDataParallel sees; two backward passes, since it complains late."""
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    made = built(method, 8, tmp_path)
    trainer = made.trainer
    batch = trainer._prepare_inputs([made.rows[row] for row in ASKED[:8]])
    trainer.rewards.close()
    assert trainer.shares_prompts
    loss = trainer.compute_loss(made.model, dict(batch))
    loss.backward()
    expected = made._taken(loss)
    wrapped = through_ranks(trainer)
    for _ in range(2):
        made.model.zero_grad()
        loss = trainer.compute_loss(wrapped, dict(batch))
        loss.backward()
        assert loss.item() == expected[0]
        assert apart(made._taken(loss)[1], expected[1]) < 1e-12


def test_a_resume_in_a_later_epoch_goes_on_in_that_epochs_order(monkeypatch):
    def share_of_the_second(_):
        """What transformers does for one of two processes: prompts in an order of their own, dealt out in batches."""
        rows = list(range(24))
        loader = DataLoader(rows, 2, sampler=EpochSampler(rows, 1, seed=7))
        return prepare_data_loader(loader, num_processes=2, process_index=1, use_seedable_sampler=True)

    monkeypatch.setattr(Trainer, "get_train_dataloader", share_of_the_second)

    def order(skipped):
        loader = RunTrainer.get_train_dataloader(object.__new__(RunTrainer))
        loader = skip_first_batches(loader, skipped) if skipped else loader
        loader.set_epoch(3)
        return [batch.tolist() for batch in loader]

    whole = order(0)
    assert len(whole) == 6
    assert order(2) == whole[2:]


def _rank(rank, method, batch, folder):
    """One of two processes: its half of the answers, sampled, scored and learned from."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", WORKBENCH_CACHE=f"{folder}/cache-{rank}")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    (mine := RunFolder(f"{folder}/{rank}").path).mkdir()
    made = built(method, batch, mine, ranks=2)
    trainer = made.trainer
    torch.manual_seed(10 + rank)
    mine = trainer._generate_and_score_completions([made.rows[row] for row in ASKED[rank * batch : (rank + 1) * batch]])
    trainer.rewards.close()
    wrapped = through_ranks(trainer)
    loss = trainer.compute_loss(wrapped, dict(mine))
    loss.backward()
    value, gradients = made._taken(loss)
    found = {"answers": trainer._answers[0], "batch": mine, "loss": value, "gradients": gradients}
    found["told"] = dict(trainer._metrics["train"])
    torch.save(found, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "batch"),
    [("grpo", 8), ("gdpo", 8), ("ppo", 8), ("grpo", 6), ("gdpo", 6), ("ppo", 6)],
    ids=lambda value: value if isinstance(value, str) else {8: "whole groups", 6: "a group on both"}[value],
)
def test_a_step_of_two_processes_is_that_of_one(tmp_path, monkeypatch, method, batch):
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    torch.multiprocessing.spawn(_rank, (method, batch, str(tmp_path)), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]
    made = built(method, 2 * batch, tmp_path)
    trainer = made.trainer
    trainer._generate_single_turn = lambda *_: (ranks[0]["answers"] + ranks[1]["answers"], None)
    together = trainer._generate_and_score_completions([made.rows[row] for row in ASKED[: 2 * batch]])
    trainer.rewards.close()
    parts = torch.cat([per_token(rank["batch"]) for rank in ranks])
    assert parts.abs().max() > 0.1
    torch.testing.assert_close(parts, per_token(together), rtol=1e-5, atol=1e-6)
    loss = trainer.compute_loss(made.model, dict(together))
    loss.backward()
    value, gradients = made._taken(loss)
    assert (ranks[0]["loss"] + ranks[1]["loss"]) / 2 == pytest.approx(value, rel=1e-6, abs=1e-9)
    for rank in ranks:
        assert apart(rank["gradients"], gradients) < 1e-5  # advantages are in float32
        for name, values in trainer._metrics["train"].items():
            if "time" not in name:
                assert rank["told"][name] == pytest.approx(values, rel=1e-4, abs=1e-5, nan_ok=True), name


def per_token(batch):
    """The advantages of all answers' tokens, one after the other."""
    advantages, mask = batch["advantages"], batch["completion_mask"].bool()
    return (advantages if advantages.dim() > 1 else advantages.unsqueeze(1).expand(mask.shape))[mask]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["grpo", "ppo"])
def test_a_run_of_two_processes_resumes_to_the_bit(tmp_path, monkeypatch, method):
    """In the middle of a buffer and of the second epoch; groups that are shown are whole, the receipt counts the processes."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in CONVERSATIONS[:12]))
    settings = {**BASE, **GRPO, **LORA, **METHODS[method], "data.train": [{"path": str(source)}], "run.devices": 2}
    settings |= {"method.steps_per_generation": 2, "optim.gradient_accumulation_steps": 1, "optim.max_steps": 12}
    settings |= {"method.beta": 0.1, "method.num_iterations": 1, "run.save_steps": 7}
    mapping: dict[str, Any] = {"version": 1}
    for path, value in settings.items():
        section, name = path.split(".", 1)
        mapping.setdefault(section, {})[name] = value
    whole = launch_config(read(mapping).config, Facts(), runs_dir=tmp_path / "runs")
    ended(whole)
    again = resumed_from(whole, 7, tmp_path / "runs" / "again")
    again.update_json(state="failed")
    launch.resume(again)
    ended(again)
    begun = lines(whole, "started")[0]
    assert (begun["world_size"], begun["devices"]) == (2, ["cpu", "cpu"])
    entry = next(e for e in lines(whole, "receipt")[0]["entries"] if e["feature"] == "processes")
    assert (entry["requested"], entry["effective"], entry["count"]) == (2, 2, 2)
    epochs = {event["step"]: event["epoch"] for event in lines(whole, "metrics")}
    assert epochs[7] > 1
    assert told(again, 1) == told(whole, 0)
    assert sorted(told(again, 1)) == [8, 9, 10, 11, 12]
    weights = [(run.checkpoints / "checkpoint-12" / "adapter_model.safetensors").read_bytes() for run in (whole, again)]
    assert weights[0] == weights[1]
    group = read_group(whole, lines(whole, "rollout")[0])
    assert len(group["completions"]) == 4


def ended(run):
    begun = time.monotonic()
    while run.state not in ENDED:
        assert time.monotonic() - begun < 280, "it did not end in time"
        time.sleep(0.1)
    assert run.state == "finished", run.log.read_text()[-3000:]


def told(run, segment):
    later = ("step_time", "seconds", "per_second", "memory")  # of the clock and the machine
    return {
        event["step"]: {
            name: value
            for name, value in event.items()
            if name not in ("seq", "t", "segment") and not any(word in name for word in later)
        }
        for event in lines(run, "metrics", segment)
        if event["step"] > 7
    }
