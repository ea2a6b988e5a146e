"""Trainers that train at the same time, each in a thread of its own, a few steps of one and then of the next.

What slows the device down then slows all. A step's time is from the release of its trainer to the end of its work on the
device.
"""

from __future__ import annotations

import math
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType, TracebackType
from typing import Any

import torch
from _peak import in_pools
from transformers import PrinterCallback, TrainerCallback

from engine.kernels.experts.packed import PackedExperts

WARM = 3
"""Steps of an arm before its times count."""
CARD = torch.cuda.is_available()
ENDED = threading.Event()
"""Set once the process was asked to end: what was measured by then is to be written, and nothing more is begun."""


def end_in_order() -> None:
    """From here on the first SIGTERM sets `ENDED`; the next ends the process as it is."""

    def once(*_: object) -> None:
        ENDED.set()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    if not ENDED.is_set():
        signal.signal(signal.SIGTERM, once)


class Baton(TrainerCallback):
    """Holds a trainer after each few steps until it is released again."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.go, self.there = threading.Event(), threading.Event()
        self.over, self.failed = False, ""
        self.first: dict[str, float] = {}
        """What the first step logged."""
        self.losses: list[float] = []
        """Those of the first steps, before the times count."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if not logs or "loss" not in logs:
            return
        self.first = self.first or dict(logs)
        if len(self.losses) < WARM:
            self.losses.append(float(logs["loss"]))

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._hold()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.steps == 0 or ENDED.is_set():
            wait()
            self._hold()
        control.should_training_stop = self.over

    def _hold(self) -> None:
        self.there.set()
        self.go.wait()
        self.go.clear()

    def release(self) -> None:
        """Its next steps; returns when the device has done them. Raises RuntimeError when its trainer fell."""
        if self.failed:  # before its first step: nobody is there to be released
            raise RuntimeError(self.failed)
        self.there.clear()
        self.go.set()
        self.there.wait()
        if self.failed:
            raise RuntimeError(self.failed)


class Patched:
    """What a library puts under names of a module that all arms share, in force during its own arm's turns alone.

    `with Patched(module)` around what patches notes the names; each `with` of it afterwards puts the patches back.
    """

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.plain: dict[str, Any] = {}
        self.patches: dict[str, Any] = {}

    def __enter__(self) -> Patched:
        self.plain = dict(vars(self.module))
        vars(self.module).update(self.patches)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        here = vars(self.module)
        self.patches = {name: value for name, value in here.items() if self.plain.get(name) is not value}
        for name in self.patches:
            if name in self.plain:
                here[name] = self.plain[name]
            else:
                del here[name]


class Arm:
    """One trainer in its thread, and what its steps took; `turn` is entered for each of its turns."""

    def __init__(
        self,
        name: str,
        trainer: Any,
        close: Callable[[], None],
        told: str,
        steps: int,
        turn: AbstractContextManager[Any] | None = None,
    ) -> None:
        self.name, self.trainer, self.close, self.told = name, trainer, close, told
        self.turn = turn or nullcontext()
        self.baton = Baton(steps)
        trainer.add_callback(self.baton)
        trainer.remove_callback(PrinterCallback)
        self.times: list[float] = []
        self.sampling: list[float] = []
        """Milliseconds of a step's answers, where somebody has them noted."""
        self.first = math.nan, math.nan
        self.peak, self.sound = 0, True
        self.pools = 0
        """Bytes of the CUDA graphs that its first steps recorded."""
        self.config: Any = None
        """The settings that it ended up with; None of a library's trainer."""
        self.thread = threading.Thread(target=self._train, daemon=True)
        self.thread.start()
        self.baton.there.wait()

    def _train(self) -> None:
        try:
            self.trainer.train()
        except Exception as problem:  # noqa: BLE001 - one arm's failure is a finding, the others go on
            traceback.print_exc()
            self.baton.failed = f"{type(problem).__name__}: {str(problem).splitlines()[0][:200]}"
        self.baton.there.set()

    def step(self) -> float:
        wait()
        held = torch.cuda.memory_allocated()
        if CARD:
            torch.cuda.reset_peak_memory_stats()
        with self.turn:
            begun = time.perf_counter()
            self.baton.release()
            took = (time.perf_counter() - begun) * 1e3 / self.baton.steps
        self.peak = torch.cuda.max_memory_allocated() - held
        return took

    def warm(self) -> list[float]:
        """The first steps, from a seed that all arms begin with; notes loss and gradient norm of the very first."""
        torch.manual_seed(0)
        others = pooled()
        took = [self.step() for _ in range(WARM)]
        self.pools = pooled() - others
        told = self.baton.first
        self.first = told["loss"], float(told["grad_norm"])
        return took

    def apart(self, other: Arm) -> float:
        """By how much of the other's loss and gradient norm the first ones differ, the larger of the two.

        A loss that the signs of advantages make nearly nothing is held against the norm.
        """
        (loss, norm), (their_loss, their_norm) = self.first, other.first
        return max(abs(loss - their_loss) / max(abs(their_loss), their_norm), abs(norm - their_norm) / their_norm)

    def alone(self) -> float:
        """MiB that the arm would take at its peak with the card to itself, the graphs that it recorded among them."""
        model = self.trainer.model
        weights = {
            each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
            for weight in (*model.parameters(), *model.buffers())
            for each in (weight.held if isinstance(weight, PackedExperts) else (weight,))
            if each is not None
        }
        states = self.trainer.optimizer.state.values() if self.trainer.optimizer is not None else ()
        held = sum(value.nbytes for state in states for value in state.values() if isinstance(value, torch.Tensor))
        return (sum(weights.values()) + held + self.peak + self.pools) / 2**20

    def end(self) -> None:
        self.baton.over = True
        self.baton.go.set()
        self.thread.join(60)
        self.close()


def pooled() -> int:
    """Bytes of the card that recorded CUDA graphs hold, of all arms together; 0 on a CPU."""
    return in_pools(torch.cuda.memory_snapshot()) if CARD else 0


def wait() -> None:
    """Until the device has done all that it was given; on a CPU, where this script only shows that it runs, at once."""
    if CARD:
        torch.cuda.synchronize()
