"""What stands beside the form: a number that is too large is told apart from one that only changed."""

from __future__ import annotations

from textual.screen import Screen

from engine.session.consequences import Consequence
from workbench.app import WorkbenchApp
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


async def test_each_number_is_in_view_after_the_window_grew() -> None:
    """Wider, there is a line more; it was below the fold of a column whose other half stood empty."""
    panel, app = Consequences(), WorkbenchApp()
    async with app.run_test(size=(25, 20)) as pilot:
        app.push_screen(Screen())
        await pilot.pause()
        await app.screen.mount(panel)
        panel.show([Consequence(name, name, name, "1", "1") for name in ("steps", "memory_total", "checkpoints_bytes")])
        await pilot.pause()
        assert (len(panel.rendered_lines), panel.size.height) == (2, 3)
        await pilot.resize_terminal(40, 20)
        await pilot.pause()
        assert (len(panel.rendered_lines), panel.size.height) == (3, 4)
