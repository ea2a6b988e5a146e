"""A schedule's own settings, told by name."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config.files import as_yaml
from engine.session.draft import Draft


@pytest.mark.parametrize(
    ("schedule", "own", "told"),
    [
        ("cosine_with_restarts", {"num_cycle": 3}, ["num_cycle"]),
        ("polynomial", {"powr": 2.0}, ["powr"]),
        ("polynomial", {"lrend": 1e-6}, ["lrend"]),
        ("cosine_with_restarts", {"colour": 3}, ["colour", "num_cycles"]),
    ],
)
def test_a_misspelt_setting_of_a_schedule_is_told_once(schedule: str, own: dict[str, Any], told: list[str]) -> None:
    given = {"lr_scheduler_type": schedule, "lr_scheduler_kwargs": own}
    paths = [each.path for each in Draft(as_yaml({"optim": given})).findings]
    assert [path for path in paths if path.startswith("optim.lr_")] == [
        f"optim.lr_scheduler_kwargs.{key}" for key in told
    ]
