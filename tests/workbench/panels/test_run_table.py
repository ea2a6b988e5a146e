"""Runs as lines: a small curve that has the shape of the loss, names that can be told apart in little room."""

from __future__ import annotations

import pytest

from workbench.panels.run_table import _columns, _placed, spark
from workbench.panels.start_table import _ago


def test_a_small_curve_falls_where_the_loss_does() -> None:
    assert spark([6.0, 5.0, 4.0, 3.0, 2.0, 1.0]) == "█▇▅▄▂▁"
    assert spark([1.0] * 9) == "▁" * 6
    assert spark([float("nan"), 1.0]) == ""
    assert spark([1.0, 2.0], signs=6) == "▁█"


def test_a_run_keeps_its_number_and_a_model_the_end_of_its_path() -> None:
    assert _placed("a-long-name-of-a-run-0042", "run", 12) == "a-long…-0042"
    assert _placed("/models/of/mine/qwen3-8b", "model", 12) == "…ne/qwen3-8b"
    assert _placed("12", "step", 5) == "   12"


@pytest.mark.parametrize(
    ("width", "lost"), [(71, set()), (64, {"curve"}), (56, {"curve", "disk"}), (49, {"curve", "disk", "age"})]
)
def test_what_a_narrow_window_gives_up_for_names(width: int, lost: set[str]) -> None:
    cell = {
        "state": "✓ finished", "run": "finetune-0001-abcdef", "method": "SFT", "step": "10/10", "loss": "1.234",
        "curve": "▁▁▁▁▁▁", "age": "12 min", "disk": "1.0 GiB", "model": "builtin/tiny",
    }  # fmt: skip
    columns = _columns([cell], width)
    assert ({"curve", "disk", "age"} - columns.keys(), columns["run"]) == (lost, 16)
    assert len({"curve", "disk", "age"} - _columns([cell], width - 1).keys()) == min(3, len(lost) + 1)


def test_how_long_ago_something_was() -> None:
    assert [_ago(seconds) for seconds in (0, 59, 61, 7200)] == ["just now", "just now", "1 min ago", "2 h ago"]
