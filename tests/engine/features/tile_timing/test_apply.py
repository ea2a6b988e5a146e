"""Tiles by timing: on for a run that asked, told after the step that timed them, and off again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from trl.trainer.utils import add_fused_lm_head

from engine.features.cut_cross_entropy import apply as cut_cross_entropy
from engine.features.tile_timing import apply as tile_timing
from engine.kernels.tuned import Kept
from engine.kernels.tuner import TUNER
from tests.caches import own_cache
from tests.engine.features.conftest import built_of, tiny_model


def config(**kernels):
    given = {
        "kernel_auto_compose": True,
        "use_cut_ce": True,
        "fused_attn_kernel": False,
        "fused_experts": False,
        "fused_lora": False,
        "cut_ce_workspace": None,
    }
    return SimpleNamespace(method=None, kernels=SimpleNamespace(**{**given, **kernels}))


class Trainer:
    def __init__(self):
        self.model, self.entries = tiny_model(), []
        self.model.lm_head.requires_grad_(False)
        add_fused_lm_head(self.model)
        self.writer = SimpleNamespace(write=lambda kind, entries: self.entries.extend(entries))

    def training_step(self, ids):
        loss = self.model(input_ids=ids, labels=ids, fused_lm_head=True).loss
        loss.backward()
        return loss


def test_what_was_timed_stands_in_the_receipt_and_changes_no_loss(monkeypatch, tmp_path):
    trainer, ids = Trainer(), torch.randint(128, (2, 9))
    undo_head = cut_cross_entropy.apply(config(), built_of(trainer)).undo
    plain = trainer.training_step(ids).detach()
    monkeypatch.setattr(tile_timing, "kernel_serves", lambda *tensors: True)
    said = tile_timing.apply(config(), built_of(trainer))
    assert said.entry()["effective"] == "at first use"

    def clock(runs):
        for run in runs:
            run()
        return [1.0, 0.5, 0.6][: len(runs)]

    TUNER.start(clock, lambda device: Kept(tmp_path / "card.json"))
    for _ in range(2):
        torch.testing.assert_close(trainer.training_step(ids).detach(), plain)
    (entry,) = trainer.entries
    assert (entry["feature"], entry["effective"], entry["count"]) == (tile_timing.FEATURE, "timed", 1)
    assert "1 with other tiles than by hand, 0 known" in entry["detail"]
    assert "linear_logp_chunk: share 2" in entry["detail"]
    assert len(list(tmp_path.glob("*.json"))) == 1
    said.undo()
    undo_head()
    assert not TUNER.on
    assert "training_step" not in vars(trainer)


@pytest.mark.parametrize("kernels", [{"kernel_auto_compose": False}, {"use_cut_ce": False}, {}])
def test_without_a_card_without_kernels_or_unasked_nothing_is_timed(kernels):
    assert tile_timing.apply(config(**kernels), built_of(Trainer())) is None
    assert not TUNER.on


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_card_every_kernel_is_timed_once_and_a_second_run_takes_what_was_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path))
    found = []
    for origin in ("timed", "kept"):
        trainer = Trainer()
        trainer.model.cuda()
        cut_cross_entropy.apply(config(), built_of(trainer))
        plain = trainer.training_step(ids := torch.randint(128, (4, 65), device="cuda")).item()
        said = tile_timing.apply(config(), built_of(trainer))
        assert trainer.training_step(ids).item() == pytest.approx(plain, rel=1e-5)
        assert {each.origin for each in TUNER.picked} == {origin}
        found.append({(each.tiles.kernel, each.key): each.tile for each in TUNER.picked})
        said.undo()
    assert found[0] == found[1] != {}
