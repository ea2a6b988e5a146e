"""Trainers that take turns: what an arm is said to take of the card."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

MIB = 2**20


class Trainer:
    """As much of a trainer as an arm asks for: three steps without anything in them."""

    def __init__(self) -> None:
        self.model, self.optimizer, self.callbacks = torch.nn.Linear(512, 1024, bias=False), None, []
        self.add_callback, self.remove_callback = self.callbacks.append, lambda kind: None

    def train(self) -> None:
        (baton,) = self.callbacks
        control = SimpleNamespace(should_training_stop=False)
        baton.on_train_begin()
        for number in range(1, 4):
            baton.on_log(None, None, control, {"loss": 1.0, "grad_norm": 1.0})
            baton.on_step_end(None, SimpleNamespace(global_step=number), control)
            if control.should_training_stop:
                return


def test_what_an_arm_takes_has_the_graphs_that_it_recorded_in_it_and_none_of_others(monkeypatch):
    turns = importlib.import_module("_turns")
    held = iter((100 * MIB, 107 * MIB))
    monkeypatch.setattr(turns, "pooled", lambda: next(held))
    monkeypatch.setattr(turns.torch.cuda, "max_memory_allocated", lambda: 0)
    monkeypatch.setattr(turns.torch.cuda, "memory_allocated", lambda: 0)
    arm = turns.Arm("recorded", Trainer(), lambda: None, "", 1)
    arm.warm()
    arm.end()
    assert arm.alone() == 2 + 7


def test_a_comparison_that_is_asked_to_end_keeps_its_whole_rounds_and_begins_no_other():
    turns, methods = importlib.import_module("_turns"), importlib.import_module("gpu_methods")
    usual, asked = signal.getsignal(signal.SIGTERM), []

    def step() -> float:
        asked.append(None)
        if len(asked) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return float(len(asked))

    arms = [SimpleNamespace(name=name, times=[], step=step) for name in ("ours", "theirs")]
    try:
        turns.end_in_order()
        methods.take_turns(SimpleNamespace(rounds=9), "sft", arms, float("inf"))
        assert turns.ENDED.is_set()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # whoever asks again is obeyed at once
    finally:
        turns.ENDED.clear()
        signal.signal(signal.SIGTERM, usual)
    assert [arm.times for arm in arms] == [[1.0, 4.0], [2.0, 3.0]]
    assert len(asked) == 5
