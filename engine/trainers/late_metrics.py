"""Metrics of TRL's SFT loss that nothing waits for: gathered and read when they are logged, and not with each batch.

TRL asks all ranks for four numbers of each batch, one message each, and reads them at once: between forward and backward pass
the host waits for the card, and each rank for all others. Here these questions are noted where TRL asks them, and what it
computes from the answers is computed from the same numbers once they are logged, by one message for all batches since.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

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
        super().__init__(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        # Before the batch: within it what a rank that only fills in has, also of batches before, would be left out.
        if len(self._asked) >= UNREAD:
            self.read_metrics()
        step: torch.Tensor = super().training_step(*args, **kwargs)
        return step

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
        asked, self._asked = self._asked, []
        own = torch.stack([number.to(torch.float64) for number in asked])  # holds counts as well
        table = self.accelerator.gather(own.unsqueeze(0)).view(-1, len(asked)).cpu()
        answers = [table[:, place].to(number.dtype) for place, number in enumerate(asked)]
        metrics = self._metrics["train"]
        for name, values in metrics.items():
            metrics[name] = [_known(value, answers) for value in values]
        self._total_train_tokens = _known(self._total_train_tokens, answers)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        self.read_metrics()
        super().log(logs, *args, **kwargs)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        self.read_metrics()  # a checkpoint keeps the number of tokens
        super()._save_checkpoint(model, trial)


def _known(value: Any, answers: list[torch.Tensor]) -> Any:
    return value.value(answers) if isinstance(value, Later) else value
