"""A run whose numbers stop being finite: it ends and says so, or skips, or goes on as asked, and no checkpoint is lost."""

from __future__ import annotations

import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.run.index import open_view
from engine.run.store import RunFolder
from engine.trainers.finite import non_finite_weights
from engine.trainers.sft import Sft
from tests.engine.trainers.conftest import CONVERSATIONS, PAIRS, lines

HOT = {"optim.optim": "sgd", "optim.learning_rate": 10.0, "optim.max_grad_norm": 0.0, "optim.weight_decay": 1.0,
       "optim.lr_scheduler_type": "constant", "run.save_steps": 2}  # fmt: skip


def weights(run, step):
    return load_file(run.checkpoints / f"checkpoint-{step}/model.safetensors").values()


def kept(run):
    return sorted(int(path.name.split("-")[1]) for path in run.checkpoints.glob("checkpoint-*"))


def bad_at(monkeypatch, *steps, what=float("nan")):
    """The loss of the first batch of these steps is multiplied by NaN, as one row of broken numbers would do."""
    real = Sft.compute_loss

    def compute_loss(self, *args, **kwargs):
        loss = real(self, *args, **kwargs)
        bad = self.model.training and self.state.global_step + 1 in steps
        return loss * what if bad else loss

    monkeypatch.setattr(Sft, "compute_loss", compute_loss)


@pytest.mark.parametrize("logging_steps", [1, 5])
def test_a_run_that_diverges_ends_with_the_step_and_keeps_its_checkpoints(train, source, monkeypatch, logging_steps):
    bad_at(monkeypatch, 7)
    run = train({"data.train": [{"path": source(CONVERSATIONS)}], "run.save_steps": 2, "run.save_total_limit": 2,
                 "run.logging_steps": logging_steps, "optim.max_steps": 30}, code=1)  # fmt: skip
    (failed,) = lines(run, "failed")
    assert (failed["cause"], failed["step"]) == ("diverged", 7)
    assert "diverged at step 7: the loss was not finite" in failed["message"]
    assert lines(run, "metrics")[-1]["loss"] is None
    assert lines(run, "metrics")[-1]["step"] <= 8
    assert kept(run) == [4, 6]
    assert all(weight.isfinite().all() for step in kept(run) for weight in weights(run, step))
    assert not lines(run, "finished")


def test_a_rate_that_is_too_high_never_leaves_weights_that_are_not_finite(train, source):
    run = train({**HOT, "data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 30}, code=1)
    assert lines(run, "failed")[0]["cause"] == "diverged"
    assert all(weight.isfinite().all() for step in kept(run) for weight in weights(run, step))
    assert not list(run.checkpoints.glob("*.tmp"))


def broken_after(monkeypatch, step):
    """One weight is infinite once the gradients of this step have been measured."""
    real = Sft._get_grad_norm

    def then_broken(self, model, *args, **kwargs):
        norm = real(self, model, *args, **kwargs)
        if self.state.global_step + 1 == step:
            next(model.parameters()).data.view(-1)[5] = math.inf
        return norm

    monkeypatch.setattr(Sft, "_get_grad_norm", then_broken)


def test_weights_that_break_before_a_save_end_the_run_there(train, source, monkeypatch):
    broken_after(monkeypatch, 4)
    run = train({"data.train": [{"path": source(CONVERSATIONS)}], "run.save_steps": 2}, code=1)
    (failed,) = lines(run, "failed")
    assert (failed["cause"], failed["step"], kept(run)) == ("diverged", 4, [2])
    assert "the weights were not finite" in failed["message"]


def test_weights_that_break_in_the_last_step_are_not_saved_and_nothing_is_finished(train, source, monkeypatch):
    broken_after(monkeypatch, 6)
    run = train({"data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 6}, code=1)
    (failed,) = lines(run, "failed")
    assert (failed["cause"], failed["step"]) == ("diverged", 6)
    assert "the weights were not finite" in failed["message"]
    assert kept(run) == [4]


def test_skip_leaves_the_step_out_and_changes_nothing_by_it(train, source, monkeypatch):
    settings = {"data.train": [{"path": source(CONVERSATIONS)}], "optim.lr_scheduler_type": "constant",
                "run.on_nan": "skip", "optim.max_steps": 4, "run.save_steps": 1}  # fmt: skip
    bad_at(monkeypatch, 3)
    run = train(settings)
    (before, after) = (torch.cat([each.flatten() for each in weights(run, step)]) for step in (2, 3))
    assert torch.equal(before, after)
    assert not torch.equal(before, torch.cat([each.flatten() for each in weights(run, 4)]))
    losses = {line["step"]: line["loss"] for line in lines(run, "metrics")}
    assert losses[3] is None
    assert all(losses[step] > 0 for step in (1, 2, 4))
    assert lines(run, "diverged")[0]["step"] == 3
    assert lines(run, "finished")[0]["step"] == 4


def test_too_many_skipped_in_a_row_end_the_run(train, source, monkeypatch):
    bad_at(monkeypatch, 2, *range(5, 30))
    run = train({"data.train": [{"path": source(CONVERSATIONS)}], "run.on_nan": "skip", "run.max_skipped_steps": 3,
                 "optim.max_steps": 30, "run.logging_steps": 4}, code=1)  # fmt: skip
    (failed,) = lines(run, "failed")
    assert (failed["cause"], failed["step"]) == ("diverged", 8)
    assert "run.max_skipped_steps" in failed["message"]
    assert kept(run) == [4]


def test_go_on_ends_as_failed_without_finite_weights_and_keeps_the_last_finite_checkpoint(train, source, monkeypatch):
    bad_at(monkeypatch, 5)
    run = train({"data.train": [{"path": source(CONVERSATIONS)}], "run.on_nan": "go_on", "run.save_steps": 2,
                 "run.save_total_limit": 2}, code=1)  # fmt: skip
    (failed,) = lines(run, "failed")
    assert (failed["cause"], failed["step"]) == ("diverged", 10)
    assert kept(run) == [2, 4]
    assert all(weight.isfinite().all() for step in (2, 4) for weight in weights(run, step))
    assert any("checkpoint-6 is not saved" in found["message"] for found in lines(run, "finding"))


def test_go_on_with_weights_that_stay_finite_finishes_and_still_tells_of_it(train, source, monkeypatch):
    real = Sft._clip_grad_norm

    def clip_grad_norm(self, model):
        return real(self, model) * (math.inf if self.state.global_step == 3 else 1)

    monkeypatch.setattr(Sft, "_clip_grad_norm", clip_grad_norm)
    run = train({"data.train": [{"path": source(CONVERSATIONS)}], "run.on_nan": "go_on"})
    assert lines(run, "finished")
    with open_view(run) as watch:
        assert watch.view.diverged_at == 4


def test_a_gradient_norm_that_is_not_finite_ends_it_too(train, source, monkeypatch):
    # transformers' own loss of 0 beside a broken gradient is what hides it.
    real = Sft.training_step

    def training_step(self, model, *args, **kwargs):
        loss = real(self, model, *args, **kwargs)
        if self.state.global_step + 1 == 3:
            next(model.parameters()).grad.view(-1)[7] = math.nan
        return loss

    monkeypatch.setattr(Sft, "training_step", training_step)
    run = train({"data.train": [{"path": source(CONVERSATIONS)}], "optim.max_grad_norm": 0.0}, code=1)
    assert "the gradient norm was not finite" in lines(run, "failed")[0]["message"]
    assert lines(run, "failed")[0]["step"] == 3


def test_a_model_with_weights_that_are_not_finite_is_refused_by_name(train, source, tmp_path):
    from engine.builtin import tiny

    folder = tmp_path / "broken"
    shutil.copytree(tiny.folder(None), folder)
    file = folder / "model.safetensors"
    held = load_file(file)
    name = sorted(held)[3]
    held[name].view(-1)[0] = math.nan
    save_file(held, file, {"format": "pt"})
    run = train({"model.name": str(folder), "data.train": [{"path": source(CONVERSATIONS)}]}, code=1)
    (failed,) = lines(run, "failed")
    assert failed["cause"] == "error"
    assert name in failed["message"]
    assert "not finite" in failed["message"]
    assert not lines(run, "started")


def test_a_checkpoint_that_was_saved_with_weights_that_are_not_finite_is_not_gone_on_from(train, source):
    from engine.run import checkpoint

    run = train({"data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 4, "run.save_steps": 2})
    last = run.checkpoints / "checkpoint-4"
    held = load_file(last / "model.safetensors")
    next(iter(held.values())).view(-1)[0] = math.nan
    tmp = last.with_suffix(".tmp")
    shutil.copytree(last, tmp)
    save_file(held, tmp / "model.safetensors", {"format": "pt"})
    checkpoint.commit(tmp, {"step": 4})
    train(folder=run, code=1)
    assert "checkpoint-4" in lines(run, "failed")[0]["message"]
    assert "not finite" in lines(run, "failed")[0]["message"]
    shutil.rmtree(last)
    train(folder=run)
    assert lines(run, "finished", 2)[0]["step"] == 4


@pytest.mark.parametrize("method", [pytest.param("dpo", marks=pytest.mark.slow), "orpo"])
def test_pairs_too(train, source, method):
    run = train({**HOT, "method.kind": method, "data.train": [{"path": source(PAIRS)}], "optim.max_steps": 30}, code=1)
    assert lines(run, "failed")[0]["cause"] == "diverged"


def test_the_view_keeps_no_finite_loss_of_before(train, source, monkeypatch):
    bad_at(monkeypatch, 3)
    run = train({"data.train": [{"path": source(CONVERSATIONS)}]}, code=1)
    with open_view(RunFolder(run.path)) as watch:
        view = watch.view
    assert (view.state, view.cause_kind, view.diverged_at, view.step) == ("failed", "diverged", 3, 3)
    assert "loss" not in view.latest
    assert json.loads(json.dumps(view.as_json()))["cause_kind"] == "diverged"


def test_a_run_killed_after_its_last_checkpoint_trains_no_step_more(train, source, monkeypatch):
    """The last checkpoint is whole and `finished` was never written: a resume says that it is finished, no more."""
    settings = {"data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 5, "run.save_steps": 5}
    run = train(settings)
    before = [weight.clone() for weight in weights(run, 5)]
    kept_lines = [line for line in run.events.read_text().splitlines() if json.loads(line)["kind"] != "finished"]
    run.events.write_text("\n".join(kept_lines) + "\n")
    train(folder=run)
    assert [line["step"] for line in lines(run, "finished")] == [5]
    assert lines(run, "metrics", 1) == []
    assert kept(run) == [5]
    assert all(torch.equal(*pair) for pair in zip(before, weights(run, 5), strict=True))


def test_checkpoints_do_not_grow_with_the_run(train, source):
    short = {"optim.max_steps": 24, "optim.gradient_accumulation_steps": 1, "run.save_steps": 4}
    run = train({"data.train": [{"path": source(CONVERSATIONS)}], **short})
    sizes = [(run.checkpoints / f"checkpoint-{step}/trainer_state.json").stat().st_size for step in (4, 24)]
    assert sizes[1] < sizes[0] + 100
    assert sum("loss" in line for line in lines(run, "metrics")) == 24


def test_weights_in_four_bits_are_judged_by_their_scales():
    """Whatever type their bits are stored as, they may look like numbers that are not finite."""
    weight = torch.nn.Parameter(torch.tensor([math.nan, 1.0]), requires_grad=False)
    assert non_finite_weights([("head", weight)]) == "head"
    weight.quant_state = SimpleNamespace(absmax=torch.ones(2), state2=None)
    assert non_finite_weights([("head", weight)]) is None
    weight.quant_state.absmax[1] = math.inf
    assert non_finite_weights([("head", weight)]) == "head"
    packed_too = SimpleNamespace(absmax=torch.tensor([math.nan]))
    weight.quant_state = SimpleNamespace(absmax=torch.ones(2, dtype=torch.uint8), state2=packed_too)
    assert non_finite_weights([("head", weight)]) == "head"
