"""What stands beside the form: a number that is too large is told apart from one that only changed."""

from __future__ import annotations

from engine.session.consequences import Consequence
from workbench.screens.right_column import Consequences


def test_only_what_is_more_than_there_is_looks_bad() -> None:
    panel = Consequences()
    panel._numbers = [
        Consequence("steps", "steps", "steps", "12", "12"),
        Consequence("memory_total", "memory", "memory", "4 GiB", "4 GiB", change="+1 GiB", worse=True),
        Consequence("memory_total", "memory", "memory", "9 GiB", "9 GiB", over=True),
    ]
    drawn = panel.lines(60)
    assert [line[-1] for line in drawn] == [("12", "value"), ("4 GiB", "accent"), ("9 GiB !", "bad")]
