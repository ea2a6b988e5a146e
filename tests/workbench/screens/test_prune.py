"""Removing checkpoints in the app: what is shown, what is asked, and what is there afterwards."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.checkpointed import run_of_four, steps
from tests.workbench.screens.test_monitor import app_of, until
from workbench.screens.monitor import MonitorScreen
from workbench.screens.prune import PruneScreen

Shown = Callable[[Any], str]


async def test_what_stays_and_goes_is_shown_with_why_and_goes_after_a_word(tmp_path: Path, shown: Shown) -> None:
    run = run_of_four(tmp_path)
    app = app_of(run)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "free disk" in shown(app))
        assert "Done: checkpoint-2 is the best: held-out loss 1; the end is checkpoint-4." in shown(app)
        assert "loss 1 at step 2, 3 at step 1, 2 at step 4" in shown(app), "the figure of the checkpoint that is named"
        assert "2 checkpoints are neither the newest nor the best: 4.2 KiB" in " ".join(shown(app).split())
        await pilot.press("P")
        await until(pilot, lambda: "Remove 2 checkpoints, which frees 4.2 KiB" in shown(app))
        text = shown(app)
        for words in (
            "stays  checkpoint-4   4.1 KiB  held-out loss 2, the newest whole one",
            "stays  checkpoint-2   2.1 KiB  held-out loss 1, the best",
            "goes   checkpoint-3   3.1 KiB  held-out loss 1.50, older, not the best",
            "goes   checkpoint-1   1.1 KiB  held-out loss 3, older, not the best",
            "When? → ␛day 1",
        ):
            assert words in text
        # The first answer is the one that removes nothing.
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, MonitorScreen))
        assert steps(run) == [1, 2, 3, 4]
        await pilot.press("P")
        await until(pilot, lambda: "Remove 2 checkpoints" in shown(app))
        await pilot.press("plus")
        await until(pilot, lambda: "Remove 1 checkpoint, which frees 1.1 KiB" in shown(app))
        assert "one of the newest" in shown(app)
        await pilot.press("down", "enter")
        await until(pilot, lambda: "1 checkpoint removed, 1.1 KiB free." in shown(app))
        assert steps(run) == [2, 3, 4]
        await until(pilot, lambda: "1 checkpoint is neither the newest nor the best" in " ".join(shown(app).split()))


async def test_a_stopped_run_can_be_pruned_and_one_that_goes_on_is_left_alone(
    tmp_path: Path, shown: Shown, make_run: Any
) -> None:
    run = run_of_four(tmp_path, "stopped")
    app = app_of(run)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("P")
        await until(pilot, lambda: isinstance(app.screen, PruneScreen) and "goes" in shown(app))
        await pilot.press("escape")
    app = app_of(make_run("running"))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("P")
        await until(pilot, lambda: "removes older checkpoints itself" in shown(app))
        assert isinstance(app.screen, MonitorScreen)


async def test_the_last_line_names_no_checkpoint_that_somebody_has_removed(tmp_path: Path, shown: Shown) -> None:
    run = run_of_four(tmp_path)
    shutil.rmtree(run.checkpoints / "checkpoint-2")
    async with app_of(run).run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "Done: the trained model is checkpoint-4." in shown(pilot.app))
    for step in (1, 3, 4):
        shutil.rmtree(run.checkpoints / f"checkpoint-{step}")
    async with app_of(run).run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "Done, but no checkpoint is whole any more." in shown(pilot.app))
