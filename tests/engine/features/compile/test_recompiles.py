"""Layers compiled again and again: said once."""

from __future__ import annotations

import torch

from engine.features.compile import recompiles
from tests.engine.features.compile.test_fallback import Stepping, Told, built_of


def test_batches_that_compile_again_and_again_are_told_once(monkeypatch):
    told, made = Told(), 0
    trainer = Stepping(torch.nn.Linear(1, 1))
    trainer.writer = told
    monkeypatch.setattr(recompiles, "graphs_and_breaks", lambda: (made, 0))
    later = recompiles.LaterGraphs(built_of(trainer))
    for at in range(20):
        with later.batch():
            made += at in (0, 3, 4, 8, 11, 12, 13)
    ((kind, finding),) = told
    assert (kind, finding["path"]) == ("finding", "kernels.torch_compile")
    assert finding["message"].startswith("5 of 12 batches after the first waited 0 s for layers to be compiled again")
