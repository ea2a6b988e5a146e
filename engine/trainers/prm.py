"""A process reward model (arXiv:2211.14275): right or wrong for each step, read at the step's last token.

Cross-entropy of two classes over the judged steps of a batch. transformers' Trainer with our loss, since TRL has dropped
its own trainer for it.
"""

from __future__ import annotations

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
            said = ((right > 0.5) == (verdicts == 1)).float()
            margin = right[verdicts == 1].mean() - right[verdicts == 0].mean()
        self.note(model, {"accuracy": said.mean(), "margin": margin})
        # in float32 at least, also where the model is in 16 bits
        return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), verdicts)

    def receipt_note(self) -> str:
        """What the receipt tells of the loss."""
        return "a verdict at the last token of each step; no vocabulary head, so no logits of words"


build = partial(plain.build, Prm)
