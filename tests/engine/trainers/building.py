"""Trainers as the worker builds them, without a run: for tests that look at one loss on one batch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from engine.features.cut_cross_entropy import apply as cut_cross_entropy
from engine.planning.auto import resolved
from engine.rules import read
from tests.engine.features.conftest import built_of
from tests.engine.trainers.conftest import BASE


class Built:
    """A trainer with one batch, all its models in float64. TRL's own head computes in float32 inside; `exact_head` takes
    the one that does not."""

    def __init__(
        self, settings: dict[str, Any], rows: Sequence[Any], folder: Path, *, exact_head: bool = False
    ) -> None:
        from transformers import set_seed

        from engine.data.collate import collator_for
        from engine.data.prepare import prepare
        from engine.features.load import load_model
        from engine.models.adapters import add_adapter
        from engine.models.load import load_processing_class
        from engine.trainers.job import Job
        from engine.trainers.table import method

        source = folder / "rows.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        mapping: dict[str, Any] = {"version": 1}
        for path, value in (BASE | {"data.train": [{"path": str(source)}]} | settings).items():
            section, name = path.split(".", 1)
            mapping.setdefault(section, {})[name] = value
        reading = read(mapping)
        errors = [finding.message for finding in reading.findings if finding.severity == "error"]
        assert not errors, errors
        self.config = resolved(reading.config)
        set_seed(1)
        tokenizer = load_processing_class(self.config)
        self.prepared = prepare(self.config, tokenizer)
        self.collate = collator_for(self.config, tokenizer)
        model = add_adapter(load_model(self.config), self.config)
        module = method(self.config.method.kind)
        self.trainer = module.build(Job(self.config, folder, model, tokenizer, self.collate, self.prepared.dataset))
        self.model = self.trainer.model
        self.reference = getattr(self.trainer, "ref_model", None)
        for each in (self.model, self.reference):
            if each is not None:
                each.double()
        kernels = self.config.kernels.model_copy(update={"use_cut_ce": exact_head or self.config.kernels.use_cut_ce})
        cut_cross_entropy.apply(self.config.model_copy(update={"kernels": kernels}), built_of(self.trainer))
        self.move()
        self.rows = [self.prepared.dataset[index] for index in range(min(4, len(self.prepared.dataset)))]

    def move(self) -> None:
        """Moves the trained parameters a little, so that model and reference differ."""
        torch.manual_seed(3)
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.05 * torch.randn_like(parameter))

    def gradients(self) -> tuple[float, dict[str, torch.Tensor]]:
        """The loss of the trainer on the batch and its gradients by parameter."""
        self.model.train()
        self.model.zero_grad()
        loss = self.trainer.compute_loss(self.model, dict(self.collate(self.rows)))
        loss.backward()
        return self._taken(loss)

    def of(self, plain: Callable[..., torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
        """The same for a loss written in plain torch: `plain(built, rows)`."""
        self.model.train()
        self.model.zero_grad()
        loss = plain(self, self.rows)
        loss.backward()
        return self._taken(loss)

    def _taken(self, loss: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
        found = {
            name: parameter.grad.clone()
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }
        return loss.item(), found

    def logps(self, prompt: Sequence[int], answer: Sequence[int], *, reference: bool = False) -> torch.Tensor:
        """Log-probabilities of the answer's tokens, one row at a time, through plain logits."""
        ids = torch.tensor([[*prompt, *answer]])
        if not reference:
            logits = self.model(input_ids=ids).logits
        else:
            with torch.no_grad():
                if self.reference is not None:
                    logits = self.reference(input_ids=ids).logits
                else:
                    with self.model.disable_adapter():
                        logits = self.model(input_ids=ids).logits
        spread = logits[0, :-1].log_softmax(-1)
        picked = spread.gather(-1, ids[0, 1:, None])[:, 0]
        return picked[len(prompt) - 1 :]


def apart(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest relative root mean square difference of a parameter's gradient."""
    assert ours.keys() == theirs.keys()
    assert ours
    return max(((ours[name] - theirs[name]).norm() / theirs[name].norm().clamp(min=1e-12)).item() for name in theirs)
