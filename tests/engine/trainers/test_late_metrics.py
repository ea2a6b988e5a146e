"""Metrics that are read once they are logged are the numbers that TRL computes with each batch."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from trl import SFTTrainer

from engine.compat.trl_head import FusedForward
from engine.run.store import RunFolder
from engine.trainers import late_metrics
from engine.trainers.late_metrics import LateMetrics, Later
from tests.engine.trainers.building import Built
from tests.engine.trainers.conftest import CONVERSATIONS
from tests.prestarted import prestarted

SETTINGS = {"optim.per_device_train_batch_size": 2, "optim.gradient_accumulation_steps": 2, "optim.max_steps": 4,
            "run.logging_steps": 2, "run.save_steps": 3}  # fmt: skip


@pytest.fixture
def on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are written as on a device whose numbers arrive later."""
    monkeypatch.setattr(LateMetrics, "numbers_arrive_later", True)


def logged(
    folder: Any, monkeypatch: pytest.MonkeyPatch, *, late: bool
) -> tuple[list[dict[str, float]], list[int], int]:
    """What a training logs, after how many questions each, and how often ranks were asked at once."""
    folder.mkdir()
    with monkeypatch.context() as patch:
        if not late:
            patch.setattr(LateMetrics, "compute_loss", lambda self, *a, **k: SFTTrainer.compute_loss(self, *a, **k))
            patch.setattr(LateMetrics, "logs_late", lambda self: False)
        trainer = Built(SETTINGS, [{"messages": row} for row in CONVERSATIONS], folder).trainer
        trainer.attach(RunFolder(folder), None, 1, {})
        heard: list[dict[str, float]] = []
        asked: list[int] = []
        ask = trainer.accelerator.gather_for_metrics

        def counting(*args: Any, **kwargs: Any) -> Any:
            asked.append(trainer.state.global_step)
            return ask(*args, **kwargs)

        trainer.accelerator.gather_for_metrics = counting
        monkeypatch.setattr(trainer, "_save_checkpoint", lambda *_: trainer.read_metrics())
        log = type(trainer).log
        patch.setattr(
            type(trainer), "log", lambda self, logs, *a, **k: (log(self, logs, *a, **k), heard.append(dict(logs)))[0]
        )
        trainer.train()
    return heard, asked, trainer._total_train_tokens


@pytest.mark.usefixtures("on_a_card")
def test_they_are_those_of_each_batch_and_nobody_is_asked_meanwhile(tmp_path: Any, monkeypatch: Any) -> None:
    (early, asked, tokens), (late, none, same) = (
        logged(tmp_path / str(each), monkeypatch, late=each) for each in (False, True)
    )
    names = ("loss", "entropy", "mean_token_accuracy", "num_tokens")
    assert len(early) == len(late) >= 2
    for before, after in zip(early, late, strict=True):
        assert {name: before[name] for name in names if name in before} == {
            name: after[name] for name in names if name in after
        }
    assert tokens == same > 0
    assert isinstance(same, int)
    assert asked
    assert not none


EACH_STEP = {**SETTINGS, "run.logging_steps": 1, "optim.gradient_accumulation_steps": 1}


@pytest.mark.usefixtures("on_a_card")
def test_a_step_has_its_line_though_the_rows_of_the_next_cannot_be_read(tmp_path: Any, monkeypatch: Any) -> None:
    trainer = Built(EACH_STEP, [{"messages": row} for row in CONVERSATIONS], tmp_path).trainer
    trainer.attach(RunFolder(tmp_path), None, 1, {})
    take, heard = trainer.get_batch_samples, []

    def reads(*args: Any) -> Any:
        if trainer.state.global_step == 2:
            raise OSError("the disk is gone")
        return take(*args)

    monkeypatch.setattr(trainer, "get_batch_samples", reads)
    monkeypatch.setattr(trainer, "log", lambda logs, *_: heard.append(trainer.state.global_step))
    with pytest.raises(OSError, match="the disk is gone"):
        trainer.train()
    assert heard == [1, 2]


@pytest.mark.parametrize("later", [False, True])
def test_on_a_cpu_a_step_has_its_line_before_the_next_one_is_computed(
    later: bool, tmp_path: Any, monkeypatch: Any
) -> None:
    if later:
        monkeypatch.setattr(LateMetrics, "numbers_arrive_later", True)
    trainer = Built(EACH_STEP, [{"messages": row} for row in CONVERSATIONS], tmp_path).trainer
    trainer.attach(RunFolder(tmp_path), None, 1, {})
    compute, lines, heard = trainer.compute_loss, [], []
    monkeypatch.setattr(trainer, "compute_loss", lambda *a, **k: (heard.append(len(lines)), compute(*a, **k))[1])
    monkeypatch.setattr(trainer, "log", lambda logs, *_: lines.append(logs))
    monkeypatch.setattr(trainer, "_save_checkpoint", lambda *_: None)
    trainer.train()
    assert (heard == [0, 1, 2, 3]) is not later


@pytest.mark.usefixtures("on_a_card")
def test_numbers_are_read_once_they_have_come_also_where_many_wait(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(late_metrics, "UNREAD", 4)
    trainer = Built(EACH_STEP, [{"messages": row} for row in CONVERSATIONS], tmp_path).trainer
    trainer.attach(RunFolder(tmp_path), None, 1, {})
    read, come = trainer.read_metrics, []
    monkeypatch.setattr(trainer, "read_metrics", lambda: (come.append(trainer._over is None), read()))
    monkeypatch.setattr(trainer, "_save_checkpoint", lambda *_: None)
    trainer.train()
    assert len(come) >= 4
    assert all(come), "while a step is not logged, its numbers are on their way from the device"


def test_the_head_knows_how_many_tokens_of_a_batch_have_a_label(tmp_path: Any, monkeypatch: Any) -> None:
    told = []
    fields = FusedForward._fields
    monkeypatch.setattr(
        FusedForward,
        "_fields",
        lambda self, hidden, labels, head, known: (
            told.append((known, int((labels != -100).sum()))),
            fields(self, hidden, labels, head, known),
        )[1],
    )
    trainer = Built(SETTINGS, [{"messages": row} for row in CONVERSATIONS], tmp_path, exact_head=True).trainer
    trainer.attach(RunFolder(tmp_path), None, 1, {})
    monkeypatch.setattr(trainer, "_save_checkpoint", lambda *_: None)
    trainer.train()
    assert told
    assert all(known == count for known, count in told)


def test_a_batch_without_trained_tokens_counts_as_nothing() -> None:
    below, above = Later(lambda answers: answers[0]), Later(lambda answers: answers[1])
    value = (above.sum() / below.sum()).item() if below.sum() > 0 else math.nan
    assert value.value([torch.tensor([0, 0]), torch.tensor([0.0, 0.0])]) == 0.0
    assert value.value([torch.tensor([1, 3]), torch.tensor([1.0, 1.0])]) == 0.5


RANK = """
import sys, torch
from engine.trainers.clock import StepClock
from engine.trainers.ranks import Ranks

rank = int(sys.argv[1])
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
ranks = Ranks(StepClock())
ranks.meet(60)
print([ranks.agreed(wish if rank == 0 else 0) for wish in (0, 2, 5)])
torch.distributed.destroy_process_group()
"""


def test_the_first_ranks_word_is_everybodys(tmp_path: Any) -> None:
    prestarted.wait()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", RANK, str(rank), str(tmp_path / "meet")],
            env={**os.environ, prestarted.WARM: "1"}, text=True, stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    assert [rank.communicate(timeout=100)[0] for rank in ranks] == ["[0, 2, 5]\n"] * 2
