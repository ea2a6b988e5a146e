"""Pairs judged without a reference model: one pass over both answers, through the head that never forms all logits.

Built on TRL's SFTTrainer, which brings that head and holds no second model; TRL's own trainers for such losses form full
logits. A method gives `judge`: scores of a batch to its loss and rewards. Sums and means are over the answers' tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from trl import SFTTrainer

from engine.config.kinds import MethodSection
from engine.data.pretokenized import IGNORED
from engine.trainers import sft
from engine.trainers.job import Job
from engine.trainers.run_trainer import RunTrainer


@dataclass(frozen=True)
class Pair:
    """Log-probabilities of B pairs, each [B] float32 (float64 in a float64 model): sums and means over an answer's
    tokens."""

    chosen: torch.Tensor
    rejected: torch.Tensor
    chosen_mean: torch.Tensor
    rejected_mean: torch.Tensor


@dataclass(frozen=True)
class Judged:
    """The mean loss of a batch, a reward for each answer ([B], no gradient), and more curves by name."""

    loss: torch.Tensor
    chosen: torch.Tensor
    rejected: torch.Tensor
    curves: dict[str, torch.Tensor]


MEANS_OF_PAIRS = (
    *("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"), "logps/chosen", "logps/rejected",
)  # fmt: skip
"""Curves of pairs that are a mean over a batch's pairs, under TRL's names."""


class ReferenceFree(RunTrainer, SFTTrainer):
    """The base of methods that compare two answers by the model's own log-probabilities."""

    # The loss is a mean over pairs, so that gradient accumulation averages it.
    loss_by = "ours, on SFTTrainer"
    """Whose loss it is, for the receipt."""
    means_of_rows = MEANS_OF_PAIRS
    loss_is_scaled_for_ga: Any = False  # TRL's base declares it as None
    method: MethodSection
    """The method's section."""

    def judge(self, pair: Pair) -> Judged:
        """The method's loss."""
        raise NotImplementedError

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> torch.Tensor:
        labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, IGNORED)
        given = {name: value for name, value in inputs.items() if name != "completion_mask"}
        outputs = model(**given, labels=labels, use_cache=False, fused_lm_head=True)
        counts = outputs.label_mask.sum(1)
        sums = outputs.log_probs.sum(1)
        pair = Pair(*sums.chunk(2), *(sums / counts.clamp(min=1)).chunk(2))
        judged = self.judge(pair)
        loss = judged.loss
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * outputs.aux_loss
            judged.curves["aux_loss"] = outputs.aux_loss
        self._note(model, judged, outputs, pair, inputs)
        return loss

    @torch.no_grad()
    def _note(self, model: torch.nn.Module, judged: Judged, outputs: Any, pair: Pair, inputs: dict[str, Any]) -> None:
        """The curves of the batch, under TRL's names; one copy from the device, one exchange between ranks.

        As in TRL's trainers for such losses, `logps` are what the losses compare: means over an answer's tokens.
        """
        margins = judged.chosen - judged.rejected
        tokens = outputs.label_mask.sum().clamp(min=1)
        top_chosen, chosen_mask = outputs.is_top1.chunk(2)[0], outputs.label_mask.chunk(2)[0]
        curves = {
            "rewards/chosen": judged.chosen.mean(),
            "rewards/rejected": judged.rejected.mean(),
            "rewards/accuracies": (margins > 0).float().mean(),
            "rewards/margins": margins.mean(),
            "logps/chosen": pair.chosen_mean.mean(),
            "logps/rejected": pair.rejected_mean.mean(),
            "entropy": outputs.entropy.sum() / tokens,
            "mean_token_accuracy": (top_chosen * chosen_mask).sum() / chosen_mask.sum().clamp(min=1),
            **judged.curves,
        }
        own = torch.stack([value.float() for value in curves.values()]) * self.batch_part.weight
        values = self.accelerator.reduce(own, "mean").tolist()
        mode = "train" if model.training else "eval"
        for name, value in zip(curves, values, strict=True):
            self._metrics[mode][name].append(value)
        if mode == "train":
            tokens = inputs["attention_mask"].sum() * (not self.batch_part.fills_in)
            self._total_train_tokens += int(self.accelerator.reduce(tokens))
        self._metrics[mode]["num_tokens"] = [self._total_train_tokens]

    def receipt_note(self) -> str:
        """What the receipt adds about the loss."""
        return "no reference model: none is loaded"


def build(kind: type[ReferenceFree], job: Job) -> ReferenceFree:
    """The trainer of this kind, ready to `attach`."""
    trainer = kind(args=sft.arguments(job.config, job.run_folder), **job.trainer_arguments())
    trainer.method = job.config.method
    return trainer
