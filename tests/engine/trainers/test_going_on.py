"""A run that goes on with other settings trains with them, and not with those of its checkpoint."""

from __future__ import annotations

import pytest

from engine.errors import UsageError
from engine.resume import changed_config
from tests.engine.trainers.conftest import CONVERSATIONS, lines


def test_a_finished_run_is_trained_longer_with_another_rate_and_weight_decay(train, source):
    settings = {"data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 4, "run.save_steps": 4}
    run = train({**settings, "optim.learning_rate": 1e-3, "optim.lr_scheduler_type": "linear"})
    with pytest.raises(UsageError, match=r"optim\.max_steps: must be"):
        changed_config(run, {"optim.max_steps": 0})
    run.config.write_text(
        changed_config(run, {"optim.max_steps": 8, "optim.learning_rate": 2e-4, "optim.weight_decay": 0.5})
    )
    again = train(folder=run)
    rates = {entry["step"]: entry["learning_rate"] for entry in lines(again, "metrics") if "learning_rate" in entry}
    assert max(rates) == 8
    # Linear from 2e-4 to 0 over eight steps; the checkpoint's own schedule was over, at a rate five times as high.
    assert rates[6] == pytest.approx(2e-4 * (8 - 5) / 8)
    assert rates[8] == pytest.approx(2e-4 / 8)
    assert lines(again, "started")[-1]["resumed_from_step"] == 4
    assert lines(again, "finished")[-1]["step"] == 8
