"""Metrics of TRL's SFT loss that nothing waits for: gathered and read when they are logged, and not with each batch.

TRL asks all ranks for four numbers of each batch, one message each, and reads them at once: between forward and backward pass
the host waits for the card, and each rank for all others. Here these questions are noted where TRL asks them, and what it
computes from the answers is computed from the same numbers once they are logged, by one message for all batches since. And a step
is logged within the next one, once the device has that one's forward pass to do: at its own end the host would wait for it, and then
the device for the host. What several ranks tell each other for it is asked at the step's end, in its turn, and only read later.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from engine.trainers.clock import Moment
from engine.trainers.run_trainer import RunTrainer

UNREAD = 512
"""Numbers that wait to be read at most, however seldom is logged; each batch of them is a call deep."""
Column = Callable[[list[torch.Tensor]], Any]


class Later:
    """What will be computed from the ranks' answers, one tensor of a number a rank for each question: those of a tensor's ways
    that TRL takes."""

    def __init__(self, value: Column, weights: Column | None = None) -> None:
        """`weights` are those of the ranks in a mean over them, where they are not alike."""
        self.value, self.weights = value, weights

    def sum(self) -> Later:
        return Later(lambda answers: self.value(answers).sum())

    def mean(self) -> Later:
        weights = self.weights
        if weights is None:
            return Later(lambda answers: self.value(answers).mean())
        return Later(lambda answers: (self.value(answers) * weights(answers)).sum() / weights(answers).sum())

    def item(self) -> Later:
        return Later(lambda answers: self.value(answers).item())

    def __gt__(self, bound: float) -> bool:
        """TRL asks whether a batch has trained tokens, to divide by their number: the quotient of one that has none is 0."""
        return True

    def __truediv__(self, other: Later) -> Later:
        def quotient(answers: list[torch.Tensor]) -> Any:
            below = other.value(answers)
            return self.value(answers) / below if below > 0 else torch.zeros(())

        return Later(quotient)

    def __floordiv__(self, size: int) -> Later:
        return Later(lambda answers: self.value(answers) // size)

    def __radd__(self, before: int | Later) -> Later:
        if isinstance(before, Later):
            return Later(lambda answers: before.value(answers) + self.value(answers))
        return Later(lambda answers: before + self.value(answers))

    __add__ = __radd__


class LateMetrics(RunTrainer):
    """Mixed in before TRL's SFTTrainer."""

    _metrics: dict[str, Any]
    _total_train_tokens: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._asked: list[torch.Tensor] = []
        self._told: torch.Tensor | None = None
        """The answers, once they are on their way to the host."""
        self._over: _Over | None = None
        super().__init__(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        # Before the batch: within it what a rank that only fills in has, also of batches before, would be left out.
        if len(self._asked) >= UNREAD:
            self.log_over()  # its numbers may still be on their way
            self.read_metrics()
        step: torch.Tensor = super().training_step(*args, **kwargs)
        self.log_over()  # of a batch that asks nothing: behind it the state is that of the next step
        return step

    def train(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().train(*args, **kwargs)
        except BaseException:
            # What ended the next step, or the reading of its rows, takes no line of this one; and what a device that has
            # failed says meanwhile is not what the run ends by.
            with contextlib.suppress(RuntimeError):
                self.log_over()
            raise

    def compute_loss(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not self.model.training:
            return super().compute_loss(model, *args, **kwargs)
        with self._noting():
            return super().compute_loss(model, *args, **kwargs)

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        """Within it a question to all ranks is noted and not asked."""
        accelerator = self.accelerator
        ask = accelerator.gather_for_metrics
        accelerator.gather_for_metrics = self._note
        try:
            yield
        finally:
            accelerator.gather_for_metrics = ask

    def _note(self, number: torch.Tensor) -> Later:
        # The first question of a batch: its forward pass is with the device, which has enough to do meanwhile.
        self.log_over()
        place, own, part = len(self._asked), number.detach(), self.batch_part
        self._asked.append(torch.zeros_like(own) if part.fills_in else own)
        if not part.uneven or not own.is_floating_point():
            return Later(lambda answers: answers[place])
        self._asked.append(torch.full_like(own, part.weight))
        return Later(lambda answers: answers[place], lambda answers: answers[place + 1])

    def read_metrics(self) -> None:
        """Reads what was noted and puts TRL's numbers in the place of what stood for them. All ranks call it together."""
        if not self._asked:
            return
        table = self._answers().cpu() if self._told is None else self._told
        (asked, self._asked), self._told = (self._asked, []), None
        answers = [table[:, place].to(number.dtype) for place, number in enumerate(asked)]
        metrics = self._metrics["train"]
        for name, values in metrics.items():
            metrics[name] = [_known(value, answers) for value in values]
        self._total_train_tokens = _known(self._total_train_tokens, answers)

    def _answers(self) -> torch.Tensor:
        """What all ranks answer, a row each, on the device."""
        own = torch.stack([number.to(torch.float64) for number in self._asked])  # holds counts as well
        table: torch.Tensor = self.accelerator.gather(own.unsqueeze(0)).view(-1, len(self._asked))
        return table

    @property
    def numbers_arrive_later(self) -> bool:
        """Whether a step's numbers are waited for. A CPU has them at once, and a run that is killed there has a line of its
        last step."""
        return self.args.device.type != "cpu"

    def logs_late(self) -> bool:
        """Whatever else is done at a step's end comes behind its line."""
        control = self.control
        other = control.should_save or control.should_evaluate or control.should_training_stop
        return self.numbers_arrive_later and not (other or control.should_epoch_stop)

    def _maybe_log_save_evaluate(self, tr_loss: torch.Tensor, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        self.log_over()
        due = self.control.should_log and self.state.global_step > self._globalstep_last_logged
        if not (due and self.logs_late()):
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)
            return
        self.control.should_log = False
        several = self.accelerator.num_processes > 1
        loss = _to_host(self.accelerator.gather(tr_loss.detach()).mean() if several else tr_loss)
        norm = _to_host(grad_norm)
        self._told = _to_host(self._answers()) if self._asked else None
        self.counts.ask()
        tr_loss -= tr_loss
        arrived = None
        if tr_loss.is_cuda:
            arrived = torch.cuda.Event()
            arrived.record()
        self._over = _Over(loss, norm, args, kwargs, arrived, self.clock.moment())

    def log_over(self) -> None:
        """Logs the step that is over and was not logged at its end, if there is one."""
        if self._over is None:
            return
        over, self._over = self._over, None
        ended = over.ended
        if over.arrived is not None and not over.arrived.query():
            over.arrived.synchronize()
            ended = ended._replace(at=time.monotonic())
        control = self.control
        wanted = control.should_log, control.should_evaluate, control.should_save
        self.clock.ended = ended
        try:
            self.finite.settle(control, all_steps=True)
            control.should_log, control.should_evaluate, control.should_save = True, False, False
            if self.accelerator.num_processes > 1:
                self._log_of_all(over)
            else:
                super()._maybe_log_save_evaluate(over.loss, over.norm, *over.args, **over.kwargs)
        finally:
            self.clock.ended = None
            control.should_log, control.should_evaluate, control.should_save = wanted

    def _log_of_all(self, over: _Over) -> None:
        """What transformers logs of a step, but for asking the ranks, who are in another by now. The operations are added up where
        they are needed, at a checkpoint and the end."""
        loss, steps = float(over.loss), self.state.global_step - self._globalstep_last_logged
        self._total_loss_scalar += loss
        self._globalstep_last_logged = self.state.global_step
        logs = {"loss": loss / steps}
        if over.norm is not None:
            logs["grad_norm"] = float(over.norm)
        logs["learning_rate"] = over.kwargs["learning_rate"]
        *_, start_time = over.args
        self.log(logs, start_time)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        self.read_metrics()
        super().log(logs, *args, **kwargs)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        self.read_metrics()  # a checkpoint keeps the number of tokens
        super()._save_checkpoint(model, trial)


class _Over(NamedTuple):
    """A step that is over: its loss and gradient norm on the host, what else is said of it, the moment on the device when
    they are there, and that of the host."""

    loss: torch.Tensor
    norm: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    arrived: Any
    ended: Moment


def _to_host(number: Any) -> Any:
    """A copy on the host, on its way where it comes from a device."""
    if not isinstance(number, torch.Tensor):
        return number
    return number.detach().to("cpu", non_blocking=True, copy=True)


def _known(value: Any, answers: list[torch.Tensor]) -> Any:
    return value.value(answers) if isinstance(value, Later) else value
