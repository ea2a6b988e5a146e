"""What `auto` becomes is told with a reason that holds."""

from __future__ import annotations

import pytest

from engine.planning.auto import effective
from engine.rules import read


@pytest.mark.parametrize(
    ("held_out", "reason"), [(0, "not used: no rows are held out"), (0.1, "ten times in 50 steps")]
)
def test_nobody_is_told_of_evaluations_where_no_rows_are_held_out(held_out, reason):
    data = {"train": [{"path": "builtin/dates"}], "val_set_size": held_out}
    config = read({"version": 1, "data": data, "optim": {"max_steps": 50}}).config
    (entry,) = (entry for entry in effective(config, None) if entry.path == "run.eval_steps")
    assert (reason in entry.reason, entry.effective) == (True, 5)
