"""Held-out rows are computed in bfloat16 and the training never notices."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from engine.features.bf16_full_eval.apply import apply
from tests.engine.features.conftest import built_of, tiny_model
from tests.engine.trainers.conftest import CONVERSATIONS, PAIRS, lines

ON = SimpleNamespace(optim=SimpleNamespace(bf16_full_eval=True))


class Evaluating:
    """What the patch needs of a trainer: models and an evaluation."""

    def __init__(self, fails=False):
        self.model, self.ref_model, self.fails = tiny_model(), tiny_model(), fails

    def average_weights(self):
        """Comes first: what a schedule-free optimizer averages into is what must come back."""
        assert {weight.dtype for weight in self.model.parameters()} == {torch.float32}

    def evaluate(self):
        if self.fails:
            raise RuntimeError("no room")
        ids = torch.arange(24).reshape(2, 12)
        with torch.no_grad():
            return self.model(ids).logits, self.ref_model(ids).logits


def test_weights_are_bfloat16_inside_and_the_same_tensors_afterwards():
    trainer, cast = Evaluating(), tiny_model()
    places = [weight.data_ptr() for weight in trainer.model.parameters()]
    done = apply(ON, built_of(trainer))
    angles = {name: buffer.clone() for name, buffer in cast.named_buffers()}
    cast.to(torch.bfloat16)
    for name, buffer in cast.named_buffers():
        buffer.data = angles[name]
    with torch.no_grad():
        truth = cast(torch.arange(24).reshape(2, 12)).logits
    for logits in trainer.evaluate():
        assert torch.equal(logits, truth)
    assert [weight.data_ptr() for weight in trainer.model.parameters()] == places
    assert {weight.dtype for weight in trainer.model.parameters()} == {torch.float32}
    assert done.count == 2 * len(places)
    done.undo()
    assert trainer.evaluate()[0].dtype == torch.float32


def test_an_evaluation_that_fails_gives_the_weights_back():
    trainer = Evaluating(fails=True)
    apply(ON, built_of(trainer))
    with pytest.raises(RuntimeError, match="no room"):
        trainer.evaluate()
    assert {weight.dtype for weight in trainer.model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("method", "rows"), [("sft", CONVERSATIONS), pytest.param("dpo", PAIRS, marks=pytest.mark.slow)]
)
def test_a_run_evaluates_in_bfloat16_and_trains_as_before(train, source, method, rows):
    files = {"data.train": [{"path": source(rows)}], "data.eval": [{"path": source(rows[:8])}]}
    settings = {**files, "method.kind": method, "optim.max_steps": 2, "run.eval_steps": 1, "run.save_steps": 2}
    runs = [train({**settings, "optim.bf16_full_eval": value}) for value in (False, True)]
    plain, ours = ([event for event in lines(run, "metrics")] for run in runs)
    assert [e["loss"] for e in ours if "loss" in e] == [e["loss"] for e in plain if "loss" in e]
    held_out, exact = ([e["eval_loss"] for e in events if "eval_loss" in e] for events in (ours, plain))
    assert len(held_out) == len(exact) > 0
    assert held_out == pytest.approx(exact, rel=0.02)
    assert held_out != exact
    said = {entry["feature"]: entry for entry in lines(runs[1], "receipt")[0]["entries"]}["bf16 full eval"]
    assert said["count"] > 0
