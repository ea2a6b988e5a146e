"""A process reward model (arXiv:2211.14275): right or wrong for each step, read at the step's last token.

Cross-entropy of two classes over the judged steps of a batch. transformers' Trainer with our loss, since TRL has dropped
its own trainer for it.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from engine.data.pretokenized import IGNORED
from engine.trainers import plain
from engine.trainers.plain import Plain, arguments

__all__ = ["Prm", "arguments", "build"]


class Prm(Plain):
    """The trainer of verdicts on steps."""

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> torch.Tensor:
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        judged = inputs["labels"] != IGNORED
        logits, verdicts = outputs.logits[judged], inputs["labels"][judged]
        with torch.no_grad():
            right = logits.float().softmax(-1)[:, 1]
            good, bad = verdicts == 1, verdicts == 0
            said = ((right > 0.5) == good).float()
            sums = torch.stack([said.sum(), right[good].sum(), right[bad].sum()])
            self._note_of_all(model, sums, torch.stack([good.sum() + bad.sum(), good.sum(), bad.sum()]))
        # in float32 at least, also where the model is in 16 bits
        return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), verdicts)

    def _note_of_all(self, model: torch.nn.Module, sums: torch.Tensor, counts: torch.Tensor) -> None:
        """Curves of the steps of all ranks' batches together: `sums` of those that are judged as they are, and of how right those
        are said to be that are and that are not, with the `counts` of each."""
        own = torch.stack([sums, counts.to(sums.dtype)]) * (not self.batch_part.fills_in)
        totals: torch.Tensor = self.accelerator.reduce(own, "sum")
        accuracy, good, bad = (totals[0] / totals[1]).tolist()  # NaN where there is none of a kind
        for name, value in {"accuracy": accuracy, "margin": good - bad}.items():
            if not math.isnan(value):
                self.curves["train" if model.training else "eval"][name].append(value)

    def receipt_note(self) -> str:
        """What the receipt tells of the loss."""
        return "a verdict at the last token of each step; no vocabulary head, so no logits of words"


build = partial(plain.build, Prm)
