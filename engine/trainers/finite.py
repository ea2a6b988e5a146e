"""What is done about numbers that are not finite: of a step's loss and gradient norm, and of weights.

`FiniteSteps` follows `run.on_nan`. What a step gave is copied off the device without waiting for it, and read one step
later, or at once where the host waits anyway (logging, evaluation, saving, sampling): a run ends at most one step after
the one that diverged, on all ranks at the same. Only `skip` must know before the optimizer's step, and waits there.

Under the gradient scaler of float16 a gradient norm that is not finite is the scaler's own business, which leaves such a
step out and halves its scale; a loss that is not finite, or a scale below 1, is not healed by that.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from engine.errors import Diverged, ModelError, WorkbenchError, visible
from engine.kernels.experts.packed import PackedExperts
from engine.models.expert_shards import share_of
from engine.run.process import host

_LOSS, _NORM = "the loss", "the gradient norm"
_CHECKED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class _Step(NamedTuple):
    """Losses of the batches and then the gradient norm, summed over processes, and behind them for each of several processes
    whether its own losses were not finite; `copied` is the moment on the device when they are on the host."""

    number: int
    values: torch.Tensor
    copied: Any


class FiniteSteps(TrainerCallback):
    """Follows the steps of one training; `diverged` is what ends it, `skipped` are the steps that were left out.

    The trainer hands in each batch's loss and each step's gradient norm, and asks `settle` at the end of a step.
    """

    def __init__(self, on_nan: str = "stop", max_skipped_steps: int = 10) -> None:
        self.on_nan, self.max_skipped_steps = on_nan, max_skipped_steps
        self.diverged: Diverged | None = None
        self.skipped = 0
        self.accelerator: Any = None
        self._losses: list[torch.Tensor] = []
        self._steps: deque[_Step] = deque()
        self._in_a_row = 0
        self._leaves_out = False
        self._without_loss = False
        self._broken: list[int] = []
        """The ranks whose own losses were not finite in the step that was read last."""

    # -- what the trainer hands in -------------------------------------------------------------------------------------
    def loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss as it goes into the sum that is logged: transformers takes the sum off itself for the next one, so a NaN
        would stay in it for good. The mean that such a step is part of is NaN (`lost_a_loss`), those after it are not."""
        self._losses.append(loss.detach().float())
        return torch.nan_to_num(loss, nan=0.0, posinf=0.0, neginf=0.0)

    def norm(self, step: int, norm: Any) -> None:
        """The gradient norm of this step, whose losses are all known."""
        device = self.accelerator.device
        norm = norm.detach() if isinstance(norm, torch.Tensor) else torch.tensor(float(norm))
        values = torch.stack([*self._losses, norm.to(device).float().reshape(())])
        self._losses = []
        if (processes := self.accelerator.num_processes) > 1:
            own = torch.arange(processes, device=device) == self.accelerator.process_index
            values = self.accelerator.reduce(torch.cat([values, own * ~values[:-1].isfinite().all()]))
        copied = None
        if values.is_cuda:
            values = values.to("cpu", non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        self._steps.append(_Step(step, values, copied))

    # -- what is made of them ------------------------------------------------------------------------------------------
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.on_nan != "skip" or not self._steps:
            return
        what = self._read(self._steps.popleft())
        self._in_a_row = self._in_a_row + 1 if what else 0
        if what:
            self.skipped += 1
            if self._in_a_row > self.max_skipped_steps:
                self.diverged = self.diverged or Diverged(
                    state.global_step + 1,
                    what,
                    f"{self.max_skipped_steps} steps before it were skipped for the same reason "
                    "(run.max_skipped_steps).",
                    of=self._whose(),
                )
            # The scaler leaves such a step out by itself and has to be asked each time.
            if self.accelerator.scaler is None:
                self._leaves_out = True
                self.accelerator.gradient_state._set_sync_gradients(False)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._leaves_out:
            self._leaves_out = False
            self.accelerator.gradient_state._set_sync_gradients(True)

    def settle(self, control: Any, *, all_steps: bool) -> bool:
        """Reads what was copied, but for the newest step unless `all_steps`; ends the training that diverged and says so."""
        while self._steps and (all_steps or len(self._steps) > 1 or self._steps[0].copied is None):
            step = self._steps.popleft()
            what = self._read(step)
            if what and self.on_nan == "stop" and self.diverged is None:
                self.diverged = Diverged(step.number, what, of=self._whose())
        if self.diverged is None:
            return False
        control.should_log = control.should_training_stop = True
        control.should_save = control.should_evaluate = False
        return True

    def _read(self, step: _Step) -> str:
        """What was not finite, nothing where all is well."""
        if step.copied is not None:
            step.copied.synchronize()
        numbers, processes = step.values.tolist(), self.accelerator.num_processes
        if processes > 1:
            self._broken = [rank for rank, broken in enumerate(numbers[-processes:]) if broken]
            del numbers[-processes:]
        *losses, norm = numbers
        if not all(map(math.isfinite, losses)):
            self._without_loss = True
            return _LOSS
        if math.isfinite(norm):
            return ""
        scaler = self.accelerator.scaler
        return "" if scaler is not None and scaler.get_scale() >= 1 else _NORM

    def _whose(self) -> str:
        """Of which processes it was, in words; nothing where all are alike. All call it together: what they read is the same."""
        if not 0 < len(self._broken) < self.accelerator.num_processes:
            return ""
        hosts = [""] * self.accelerator.num_processes
        torch.distributed.all_gather_object(hosts, host())
        return " of " + " and of ".join(f"rank {rank} on {visible(hosts[rank])}" for rank in self._broken)

    def lost_a_loss(self) -> bool:
        """Whether a step since the last call had no finite loss, so that its mean with others has none."""
        lost, self._without_loss = self._without_loss, False
        return lost


def non_finite_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """The name of the first of these weights that holds NaN or infinity; None where all are finite.

    One pass over the numbers and no copy of them; the device is waited for once. Of sharded weights, and experts that
    are divided, each rank looks at its shares, and all hear the same. Of weights in four bits it is the scales that may be
    broken: the bits stand for numbers that all are finite, whatever type they are stored as.
    """
    names, found, shares = [], [], False
    with torch.no_grad():
        for name, stored in weights:
            weight = _scales(stored)
            if isinstance(weight, PackedExperts):
                if share_of(stored) is not None:
                    # The others may have read finite ones: all hear of it.
                    names.append(name)
                    shares = True
                    found.append(torch.tensor(weight.form.finite, device=weight.device))
                elif not weight.form.finite:
                    return name
            elif weight.dtype in _CHECKED and weight.numel():
                names.append(name)
                shares |= isinstance(weight, DTensor) or share_of(stored) is not None
                held = (weight.to_local() if isinstance(weight, DTensor) else weight).detach()
                some = torch.stack(torch.aminmax(held)) if held.numel() else held
                found.append(some.isfinite().all())
        if shares:
            flags = torch.stack(found).int()
            torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MIN)
            found = list(flags)
        for device in {flag.device for flag in found}:
            places = [place for place, flag in enumerate(found) if flag.device == device]
            for place, fine in zip(places, torch.stack([found[place] for place in places]).tolist(), strict=True):
                if not fine:
                    return names[place]
    return None


def _scales(weight: torch.Tensor) -> torch.Tensor:
    """The scales of a weight that bitsandbytes has packed, those of its scales where they are packed too; else itself."""
    state: Any = getattr(weight, "quant_state", None)
    if state is None:
        return weight
    scales: torch.Tensor = state.absmax if state.state2 is None else state.state2.absmax
    return scales


def refuse_non_finite(model: torch.nn.Module, name: str) -> None:
    """Raises ModelError for a model that was loaded with numbers that are not finite."""
    if (weight := non_finite_weights(model.named_parameters())) is not None:
        raise ModelError(
            f"model.name: the weights of {visible(name)} hold numbers that are not finite (NaN or infinite): "
            f"{visible(weight)}.",
            "Nothing can be trained from them: take other files of this model, or an earlier checkpoint.",
        )


def refuse_non_finite_checkpoint(model: torch.nn.Module, path: Path) -> None:
    """Raises WorkbenchError for a checkpoint whose weights were not finite when it was made."""
    trained = ((name, weight) for name, weight in model.named_parameters() if weight.requires_grad)
    if (weight := non_finite_weights(trained)) is not None:
        raise WorkbenchError(
            f"{visible(path.name)}: its weights hold numbers that are not finite (NaN or infinite): {visible(weight)}.",
            f"Delete {visible(str(path))}: the run then goes on from the checkpoint before it.",
        )
