"""The callback that makes a training visible and steerable: metrics, batches, samples, GPU readings, requests.

It runs on every rank, and speaks on rank 0 alone. It never touches the model but to sample, and costs a few dictionary
lookups a step: counts stay on the device until they are logged, numbers, row ids and readings of the machine are made and
written by the writer's own thread, the control folder is looked at ten times a second at most, GPUs are read once a second.
"""

from __future__ import annotations

import math
import os
import time
import weakref
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import TrainerCallback

from engine import figures
from engine.compat import collective_waits, group_timeouts
from engine.facts.counts import steps_between
from engine.hardware import PEAK_FLOPS
from engine.models.expert_shards import is_divided
from engine.models.sizes import weights_in
from engine.run import inside
from engine.run.async_writer import AsyncWriter
from engine.run.control import Controls, Request
from engine.run.disk import guarded
from engine.run.events import Thinning
from engine.run.in_flight import InFlight
from engine.run.store import RunFolder
from engine.run.time_left import EVAL, PROMPTS, SAVE
from engine.trainers.best import HeldOutBest
from engine.trainers.ranks import MEMORY_SECONDS, memory_now
from engine.trainers.run_trainer import RunTrainer

BATCHES_CAP = 64 << 20
GPU_SECONDS = 1.0
_SUMMARY = ("train_runtime", "train_loss", "total_flos")
Sampler = Callable[[], list[str]]


class AllStepsMade(Exception):
    """Raised before the first step of a run that was killed between its last checkpoint and its last word."""


class Watching(TrainerCallback):
    """`writer` and `controls` are None on other ranks than the first; `sample` gives one answer a pinned prompt.

    `opening` is what the `started` event says beside the number of steps, which is known when training begins.
    """

    trainer: RunTrainer
    """Set before it trains."""
    before_first_step: Callable[[], None]
    """Called once the model is as it will be trained, and before all else."""
    per_epoch: dict[str, int]
    """How many times in an epoch there is an `eval` or a `save`, where the config counts them so."""

    def __init__(
        self,
        run: RunFolder,
        writer: AsyncWriter | None,
        controls: Controls | None,
        opening: dict[str, Any],
        logging_steps: int,
        prompts: list[str],
        prompts_steps: int,
        sample: Sampler,
    ) -> None:
        self.run, self.writer, self.controls = run, writer, controls
        self.opening, self.logging_steps, self.thinning = opening, logging_steps, Thinning(logging_steps)
        self.prompts, self.prompts_steps, self.sample = prompts, prompts_steps, sample
        self.per_epoch = {}
        self.before_first_step = lambda: None
        self.best: HeldOutBest | None = None
        self.stopped: Request | None = None
        self._early: list[Request] = []
        """Accepted during an evaluation, before the step after it that serves them."""
        self._saving: list[Request] = []
        self._at_epoch_end: list[Request] = []
        self._logged = time.monotonic()
        self._tokens_logged = 0
        self._sampled = -1
        self._ranks = 1
        self._memory: dict[str, int] = {}
        self._memory_next = 0.0
        self._gpu = _GpuReader() if writer is not None and torch.cuda.is_available() else None
        self._batches = _BatchFile(run) if writer is not None else None
        self._flop_per_token: float | None = None

    # -- the trainer's moments -----------------------------------------------------------------------------------------
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.before_first_step()
        self.trainer.draw_by_itself()
        if args.world_size > 1:
            collective_waits.time_model(self.trainer.model_wrapped, self.trainer.ranks.waits)
        self._place_in_epochs(args, state, kwargs.get("train_dataloader"))
        self._logged = time.monotonic()
        self._tokens_logged = self.trainer.counts.read()[0]
        parameters = list(self.trainer.model.parameters())
        total = sum(weights_in(p) for p in parameters)
        # 2 forward and 2 for the input's gradient a parameter; 2 more only for weights that are trained.
        self._flop_per_token = 4.0 * total + 2.0 * sum(p.numel() for p in parameters if p.requires_grad)
        self.thinning = Thinning(self.logging_steps, state.max_steps)
        self._ranks = args.world_size
        if self._ranks > 1:
            self.trainer.ranks.meet(args.ddp_timeout)
            group_timeouts.wait_as_long(args.ddp_timeout)
        loader = self.trainer.stream_loader
        pauses = {
            SAVE: state.save_steps,
            **({EVAL: state.eval_steps} if args.eval_strategy != "no" else {}),
            **({PROMPTS: self.prompts_steps} if self.prompts else {}),
        }
        if self.writer is not None:
            self.writer.write(
                "started",
                **self.opening,
                # At these steps more than a step happens: whoever waits for the next event has to know.
                pauses=list(pauses.values()),
                pause_steps=pauses,
                max_steps=state.max_steps,
                epochs=state.num_train_epochs if loader is None else loader.dataset.epochs,
                world_size=self._ranks,
                **self.thinning.started(),
            )
        if self.writer is not None:
            self.trainer.note_rows = InFlight(self.run).note
        self._samples(state.global_step)
        self.trainer.clock.start(state.global_step)

    def _place_in_epochs(self, args: Any, state: Any, loader: Any) -> None:
        """Evaluations and checkpoints that are counted by the epoch, now that its steps are known."""
        if not self.per_epoch:
            return
        # As transformers counts them.
        steps = max(1, math.ceil(len(loader) / args.gradient_accumulation_steps))
        for what, times in self.per_epoch.items():
            setattr(state, f"{what}_steps", steps_between(times, steps))

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # transformers makes a step before it looks whether there is one left: a run that was killed after its last would
        # train one more.
        if state.global_step >= state.max_steps or (self.best is not None and self.best.over):
            raise AllStepsMade

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.monotonic()
        rows, self.trainer.batch_rows = self.trainer.batch_rows, []
        self._poll_controls(control, state)
        self.trainer.ranks.waits.step_over()
        if (loader := self.trainer.stream_loader) is not None:
            # To transformers a stream is one epoch without an end.
            state.epoch = loader.epoch
            if loader.epoch_over():
                self.on_epoch_end(args, state, control)
        last = self._last(state)
        control.should_training_stop = control.should_training_stop or last
        if self._batches is not None and self.writer is not None and rows and self._has_line(control, state):
            self.writer.defer("batch", partial(self._batches.add, state.global_step, rows))
        if self._gpu is not None and self.writer is not None and self._gpu.due(now):
            self.writer.defer("gpu", self._gpu.read)
        # A checkpoint is a point of every curve: means over steps begin anew there, so a resume has nothing to make up
        # for. So is the end, which transformers logs only where logging_steps divides it.
        control.should_log = control.should_log or control.should_save or last
        if self.best is not None and control.should_evaluate and (self.best.saves or self.best.patience is not None):
            control.should_log = True
        sampling = self.prompts and state.global_step % self.prompts_steps == 0 and not last
        logs = control.should_log and not self.trainer.logs_late()
        waits = logs or control.should_evaluate or sampling or self.trainer.samples_answers
        if self.trainer.finite.settle(control, all_steps=waits):
            for request in self._saving:
                self._answer(request, "refused", "the training diverged; the last finite checkpoint is kept")
            self._saving.clear()
        elif sampling:
            self._samples(state.global_step)

    def _last(self, state: Any) -> bool:
        loader = self.trainer.stream_loader
        return bool(state.global_step == state.max_steps or (loader is not None and loader.over))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._at_epoch_end:
            self.stopped = self._at_epoch_end[0]
            self._saving += self._at_epoch_end
            self._at_epoch_end = []
            control.should_log = control.should_save = control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if self.writer is None or not logs:
            if logs and "loss" in logs:
                self.trainer.counts.read()
            return
        if any(name in logs for name in _SUMMARY):
            return
        pace = None
        if "loss" in logs:
            if not self._has_line(control, state):
                self.trainer.counts.read()
                return
            pace = self._pace(state.global_step)
            if self._ranks > 1 and (figures := self.trainer.ranks.event(state.global_step, last=self._last(state))):
                self.writer.write("ranks", **figures)
        self.writer.defer("metrics", partial(self._metrics, state.global_step, state.epoch, dict(logs), pace))

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Answered now: an evaluation may take longer than the supervisor waits for an answer.
        for request in self.controls.pending() if self.controls is not None else ():
            promise = _PROMISES[request.do].replace("this step", "that step").replace("this epoch", "that step's epoch")
            self._answer(request, "accepted", f"this evaluation ends first, then a step is made: it {promise}")
            self._early.append(request)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._saving:
            self.trainer.checkpoints.wait()
        name = f"checkpoint-{state.global_step}"
        made = (self.run.checkpoints / name).is_dir()
        for request in self._saving:
            if made:
                self._answer(request, "done", f"{name} is whole")
            else:
                self._answer(request, "refused", f"{name} is not saved: the weights are not finite")
        self._saving.clear()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for request in self._early:
            self._answer(request, "done", "the training was over with this evaluation")
        if self.trainer.finite.diverged is None:
            self._samples(state.global_step)

    def _has_line(self, control: Any, state: Any) -> bool:
        """Whether this step becomes a line of its own."""
        diverged = self.trainer.finite.diverged is not None
        return control.should_save or diverged or self.thinning.wants(state.global_step)

    # -- what they do --------------------------------------------------------------------------------------------------
    def _pace(self, step: int) -> _Pace:
        """What only this moment knows, when the host has waited for the device: tokens so far and since the last line,
        seconds, those of a step."""
        now = self.trainer.clock.now()
        tokens, trained = self.trainer.counts.read()
        rate = (tokens - self._tokens_logged) / max(now - self._logged, 1e-9)
        self._logged, self._tokens_logged = now, tokens
        return _Pace(tokens, trained, rate, *self.trainer.clock.lap(step))

    def _metrics(self, step: int, epoch: float, logs: dict[str, Any], pace: _Pace | None) -> dict[str, Any]:
        """The payload of a line of numbers; runs on the writer's thread, memory is read there."""
        values = {name: value for name, value in logs.items() if name != "epoch" and isinstance(value, (int, float))}
        payload = {"step": step, "epoch": epoch, **values}
        if pace is None:
            return payload
        payload |= {
            "tokens": pace.tokens,
            "trained_tokens": pace.trained_tokens,
            "tokens_per_second": round(pace.rate, 1),
            "step_seconds": round(pace.step_seconds, 6),
            "data_seconds": round(pace.data_seconds, 6),
        }
        if self._gpu is not None and self._gpu.peak_flops and self._flop_per_token:
            computed = pace.rate * (1 - values.get("frac_tokens_skipped", 0.0))  # the others are sampled alone
            payload["mfu"] = round(computed * self._flop_per_token / self._gpu.peak_flops, 4)
        now = time.monotonic()
        if now >= self._memory_next:
            self._memory, self._memory_next = memory_now(), now + MEMORY_SECONDS
        return payload | self._memory

    def _poll_controls(self, control: Any, state: Any) -> None:
        """What people ask for; with several ranks the first one's hearing is everybody's."""
        wish = 0
        early, self._early = self._early, []
        fresh = self.controls.pending() if self.controls is not None else []
        for request in fresh:
            self._answer(request, "accepted", _PROMISES[request.do])
        for request in [*early, *fresh]:
            if request.do == "end_of_epoch":
                self._at_epoch_end.append(request)
                wish |= 4
            else:
                if request.do in ("save_stop", "checkpoint"):
                    self._saving.append(request)
                    wish |= 1
                if request.do in ("save_stop", "stop"):
                    self.stopped = request
                    wish |= 2
                if request.do == "stop":
                    self._answer(request, "done", f"stopped after step {state.global_step}, without a new checkpoint")
        wish = self._agreed(wish)
        control.should_save = control.should_save or bool(wish & 1)
        control.should_training_stop = control.should_training_stop or bool(wish & 2)
        if wish & 2 and self.stopped is None:
            # None of them makes a last checkpoint then, which all of them would have to make together.
            self.stopped = Request(id="", do="stop", by="rank 0", t=time.time())
        if wish & 4 and not self._at_epoch_end:
            self._at_epoch_end.append(Request(id="", do="end_of_epoch", by="rank 0", t=time.time()))

    def _agreed(self, wish: int) -> int:
        if self._ranks == 1:
            return wish
        return self.trainer.ranks.agreed(wish)

    def _answer(self, request: Request, status: str, message: str) -> None:
        if self.controls is not None and request.id:
            self.controls.answer(request, status, message)

    def _samples(self, step: int) -> None:
        if not self.prompts or step == self._sampled:
            return
        self._sampled = step
        with self.trainer.clock.pause():
            self.trainer.average_weights()
            # Layers that are shared out are put together by all, and experts that are divided are asked by all.
            if self.writer is None and not self.trainer.is_fsdp_enabled and not is_divided(self.trainer.model):
                return
            for index, (prompt, completion) in enumerate(zip(self.prompts, self.sample(), strict=True)):
                if self.writer is not None:
                    self.writer.write("sample", step=step, index=index, prompt=prompt, completion=completion)


_PROMISES = {
    "stop": "stops after this step; the last checkpoint is kept, the steps after it are lost",
    "save_stop": "saves a checkpoint after this step, then stops",
    "checkpoint": "saves a checkpoint after this step and goes on",
    "end_of_epoch": "saves a checkpoint at the end of this epoch, then stops",
}


class _Pace(NamedTuple):
    tokens: int
    trained_tokens: int
    rate: float
    step_seconds: float
    data_seconds: float


class _BatchFile:
    """Row ids of batches as little-endian int64, up to a cap; `add` gives the payload of the event, None past the cap."""

    def __init__(self, run: RunFolder) -> None:
        self._path = run.batches
        self._handle = inside.open_file(run, run.batches, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        weakref.finalize(self, os.close, self._handle)  # the writer's thread may still have a batch to add
        self._size = os.fstat(self._handle).st_size // 8 * 8
        os.ftruncate(self._handle, self._size)

    def add(self, step: int, rows: list[int]) -> dict[str, int] | None:
        if self._size + 8 * len(rows) > BATCHES_CAP:
            return None
        place = self._size // 8
        data = array("q", rows).tobytes()
        guarded(self._path, lambda: f"{figures.size(len(data))} needed", lambda: self._write(data))
        self._size += len(data)
        return {"step": step, "offset": place, "count": len(rows)}

    def _write(self, data: bytes) -> None:
        """All of it, or nothing: half a batch would shift those behind it."""
        try:
            done = 0
            while done < len(data):
                done += os.write(self._handle, data[done:])
        except OSError:
            os.ftruncate(self._handle, self._size)
            raise


class _GpuReader:
    """Load, memory, temperature and power of the visible cards through NVML; absent readings are left out."""

    def __init__(self) -> None:
        import pynvml

        self._nvml = pynvml
        self._next = 0.0
        self.peak_flops: float | None = None
        try:
            pynvml.nvmlInit()
            self._cards = [_handle(pynvml, name) for name in _visible_cards()]
        except pynvml.NVMLError:
            self._cards = []
        name = torch.cuda.get_device_name()
        self.peak_flops = next((rate for part, rate in PEAK_FLOPS.items() if part in name), None)

    def due(self, now: float) -> bool:
        if not self._cards or now < self._next:
            return False
        self._next = now + GPU_SECONDS
        return True

    def read(self) -> dict[str, Any]:
        nvml, found = self._nvml, []
        for index, card in enumerate(self._cards):
            reading: dict[str, float] = {"index": index}
            for name, ask in (
                ("load", lambda c: nvml.nvmlDeviceGetUtilizationRates(c).gpu),
                ("memory_used", lambda c: nvml.nvmlDeviceGetMemoryInfo(c).used),
                ("memory_total", lambda c: nvml.nvmlDeviceGetMemoryInfo(c).total),
                ("power", lambda c: nvml.nvmlDeviceGetPowerUsage(c) / 1000),
                ("temperature", lambda c: nvml.nvmlDeviceGetTemperature(c, nvml.NVML_TEMPERATURE_GPU)),
            ):
                try:
                    reading[name] = ask(card)
                except nvml.NVMLError:
                    continue
            found.append(reading)
        return {"devices": found}


def _visible_cards() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return [part.strip() for part in named.split(",") if part.strip()] or ["0"]


def _handle(nvml: Any, name: str) -> Any:
    return nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID(name)
