"""The list of runs: where each stands, and what opening, filtering, ordering and deleting do."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.run import launch
from workbench.app import WorkbenchApp
from workbench.panels.run_table import RunTable, spark
from workbench.screens.monitor import MonitorScreen
from workbench.screens.runs import RunsScreen, read_row

Shown = Callable[[Any], str]


def app_of(root: Path) -> WorkbenchApp:
    app = WorkbenchApp(runs_dir=root)
    app.get_default_screen = lambda: RunsScreen(root)  # type: ignore[method-assign]
    return app


async def listed(pilot: Any, count: int) -> RunTable:
    """The table once it holds so many runs."""
    for _ in range(200):
        tables = pilot.app.screen.query(RunTable)
        if tables and len(tables.first().rows) == count:
            await pilot.pause(0.05)
            return tables.first()
        await pilot.pause(0.05)
    raise AssertionError("the runs were not listed")


async def test_a_run_that_nobody_can_look_after_is_a_line_that_says_why(make_run: Any, shown: Shown) -> None:
    run = make_run()
    odd = make_run(name="odd")
    odd.json.unlink()
    os.mkfifo(odd.json)
    async with app_of(run.path.parent).run_test(size=(160, 24)) as pilot:
        await listed(pilot, 2)
        text = shown(pilot.app)
    assert "run.json is not a plain file" in next(line for line in text.splitlines() if odd.id in line)
    assert "running" in next(line for line in text.splitlines() if run.id in line)


async def test_a_line_tells_state_method_step_loss_and_disk(make_run: Any, shown: Shown) -> None:
    run = make_run()
    make_run("failed", name="other", method="embedding")
    app = app_of(run.path.parent)
    async with app.run_test(size=(80, 24)) as pilot:
        await listed(pilot, 2)
        text = shown(app)
    line = next(line for line in text.splitlines() if "dates-0001" in line)
    assert "▶ running" in line
    assert "sft" in line
    assert "60/100" in line
    assert "0.2" in line
    assert "█" in line
    assert "KiB" in line
    other = next(line for line in text.splitlines() if "other-0001" in line)
    assert "✗ failed" in other
    assert " embedding " in other, "whole, in the narrowest window too"


@pytest.mark.parametrize(
    ("width", "facts"),
    [(60, "method step loss age"), (80, "method step loss age disk"), (120, "disk model")],
)
async def test_runs_with_long_names_are_told_apart_in_every_window(
    make_run: Any, shown: Shown, width: int, facts: str
) -> None:
    for _ in range(2):
        run = make_run("finished", name="a-name-that-is-longer-than-a-narrow-window")
    app = app_of(run.path.parent)
    async with app.run_test(size=(width, 24)) as pilot:
        await listed(pilot, 2)
        lines = [line for line in shown(app).splitlines() if "a-name-" in line]
        head = shown(app).splitlines()[2].split()
        assert {next(word for word in line.split() if word.startswith("a-name"))[-5:] for line in lines} == {
            "-0001",
            "-0002",
        }
        assert set(facts.split()) <= set(head)
        assert all("0.222" in line and "60/100" in line for line in lines)


async def test_the_line_below_tells_more_about_the_run_under_the_cursor(make_run: Any, shown: Shown) -> None:
    run = make_run("failed", name="bad")
    make_run("stopped", name="other")
    app = app_of(run.path.parent)
    async with app.run_test(size=(100, 24)) as pilot:
        table = await listed(pilot, 2)
        for _ in range(2):
            name = table.chosen.run.id
            words = "stopped by anna" if name == "other-0001" else "The GPU ran out of memory"
            assert words in shown(app)
            await pilot.press("down")
            await pilot.pause(0.1)
        assert "\x1b" not in shown(app)


async def test_going_on_is_offered_for_a_run_that_ended_early_alone(make_run: Any, shown: Shown) -> None:
    run = make_run("finished", name="done")
    make_run("stopped", name="early")
    make_run("running", name="going")
    app = app_of(run.path.parent)
    async with app.run_test(size=(100, 24)) as pilot:
        table = await listed(pilot, 3)
        offered = {}
        for _ in range(3):
            offered[table.chosen.run.id] = "R resume" in shown(app).splitlines()[-1]
            await pilot.press("down")
            await pilot.pause(0.1)
    assert offered == {"done-0001": False, "early-0001": True, "going-0001": False}


async def test_enter_opens_the_run_and_q_comes_back(make_run: Any) -> None:
    run = make_run()
    app = app_of(run.path.parent)
    async with app.run_test(size=(80, 24)) as pilot:
        await listed(pilot, 1)
        await pilot.press("enter")
        await pilot.pause(0.2)
        assert isinstance(app.screen, MonitorScreen)
        assert app.screen.folder.path == run.path
        await pilot.press("q")
        await pilot.pause(0.1)
        assert isinstance(app.screen, RunsScreen)


async def test_words_narrow_the_list_and_order_changes_it(make_run: Any, shown: Shown) -> None:
    root = make_run("finished", name="zebra").path.parent
    make_run("failed", name="alpha")
    app = app_of(root)
    async with app.run_test(size=(80, 24)) as pilot:
        table = await listed(pilot, 2)
        await pilot.press("o", "o")
        assert [row.run.id for row in table.rows] == ["alpha-0001", "zebra-0001"]
        large = {row.run.id: row.bytes for row in table.rows}
        await pilot.press("o", "o")
        assert [row.run.id for row in table.rows] == sorted(large, key=lambda name: -large[name])
        await pilot.press("slash", *"zeb", "enter")
        await pilot.pause(0.1)
        assert [row.run.id for row in table.rows] == ["zebra-0001"]
        assert "1 of 2 runs" in shown(app)
        await pilot.press("slash", *"xyz", "enter")
        await pilot.pause(0.1)
        assert "No run matches" in shown(app)


async def test_a_run_without_a_loss_stands_behind_those_that_have_one(make_run: Any) -> None:
    root = make_run("finished", name="learned").path.parent
    make_run("starting", name="begins")
    app = app_of(root)
    async with app.run_test(size=(80, 24)) as pilot:
        table = await listed(pilot, 2)
        await pilot.press("o", "o", "o")
        assert [row.run.id for row in table.rows] == ["learned-0001", "begins-0001"]


async def test_a_run_that_samples_answers_is_told_by_its_reward_and_ordered_behind_losses(
    make_run: Any, shown: Shown
) -> None:
    root = make_run("finished", name="learned").path.parent
    for name, reward in (("worse", 0.25), ("better", 0.5)):
        run = make_run("finished", name=name, method="grpo")
        with run.events.open("a") as events:
            line = {
                "v": 1,
                "rank": 0,
                "segment": 0,
                "seq": 9999,
                "t": 1.0,
                "kind": "metrics",
                "step": 60,
                "loss": -1e-9,
            }
            events.write(json.dumps({**line, "reward": reward}) + "\n")
    app = app_of(root)
    async with app.run_test(size=(80, 24)) as pilot:
        table = await listed(pilot, 3)
        await pilot.press("o", "o", "o")
        assert [row.run.id for row in table.rows] == ["learned-0001", "better-0001", "worse-0001"]
        lines = shown(app).splitlines()
    assert "reward 0.5" in next(line for line in lines if "better" in line)
    assert "reward" not in next(line for line in lines if "learned" in line)


async def test_a_run_is_deleted_only_when_confirmed_and_only_itself(
    make_run: Any, shown: Shown, tmp_path: Path
) -> None:
    run = make_run("finished")
    other = make_run("finished", name="other")
    outside = tmp_path / "precious"
    outside.mkdir()
    (outside / "file").write_text("kept")
    (run.samples / "link").symlink_to(outside)
    app = app_of(run.path.parent)
    async with app.run_test(size=(80, 24)) as pilot:
        table = await listed(pilot, 2)
        while table.chosen.run.id != run.id:
            await pilot.press("down")
        await pilot.press("D")
        await pilot.pause(0.1)
        assert "3 checkpoints (the newest of step 60)" in shown(app)
        await pilot.press("enter")
        await pilot.pause(0.1)
        assert run.path.is_dir()
        await pilot.press("D", "down", "enter")
        await listed(pilot, 1)
    assert not run.path.exists()
    assert other.path.is_dir()
    assert (outside / "file").read_text() == "kept"


async def test_a_living_run_is_not_deleted(make_run: Any, shown: Shown) -> None:
    run = make_run()
    app = app_of(run.path.parent)
    async with app.run_test(size=(80, 24)) as pilot:
        await listed(pilot, 1)
        await pilot.press("D")
        await pilot.pause(0.1)
        assert "is running; stop it first" in shown(app)
    assert run.path.is_dir()


async def test_resume_says_what_came_of_it(make_run: Any, shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run("stopped")
    monkeypatch.setattr(launch, "resume", lambda folder: (folder.checkpoints / "checkpoint-60", []))
    app = app_of(run.path.parent)
    async with app.run_test(size=(80, 24)) as pilot:
        await listed(pilot, 1)
        await pilot.press("R")
        for _ in range(100):
            if "dates-0001 goes on from checkpoint-60" in shown(app):
                return
            await pilot.pause(0.05)
    raise AssertionError("nothing was said")


async def test_a_resume_from_the_list_asks_too_where_rows_differ(
    make_run: Any, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("stopped")
    resumed: list[dict[str, Any]] = []

    def resume(folder: Any, **how: Any) -> Any:
        resumed.append(how)
        return folder.checkpoints / "checkpoint-60", []

    monkeypatch.setattr(launch, "resume", resume)
    monkeypatch.setattr(
        "engine.session.resume.data_changes", lambda folder, on_progress=None: ["data.train: row 3 differs"]
    )
    app = app_of(run.path.parent)

    async def shows(pilot: Any, words: str) -> None:
        for _ in range(100):
            if words in shown(app):
                return
            await pilot.pause(0.05)
        raise AssertionError(words)

    async with app.run_test(size=(80, 24)) as pilot:
        await listed(pilot, 1)
        await pilot.press("R")
        await shows(pilot, "row 3 differs")
        assert resumed == []
        await pilot.press("down", "enter")
        await shows(pilot, "goes on from checkpoint-60")
    assert resumed == [{"accept_data": True}]


async def test_an_empty_list_says_how_to_begin(tmp_path: Path, shown: Shown) -> None:
    app = app_of(tmp_path / "none")
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.6)
        assert "workbench demo" in shown(app)


async def test_links_and_strange_folders_are_not_listed(make_run: Any, tmp_path: Path, shown: Shown) -> None:
    run = make_run("finished")
    (run.path.parent / "link-0001").symlink_to(run.path)
    (run.path.parent / "notes").mkdir()
    app = app_of(run.path.parent)
    async with app.run_test(size=(80, 24)) as pilot:
        table = await listed(pilot, 1)
        assert [row.run.id for row in table.rows] == [run.id]


def test_an_ended_run_is_read_once(make_run: Any) -> None:
    run = make_run("finished")
    first = read_row(run, None)
    assert read_row(run, first) is first
    with open(run.events, "a", encoding="utf-8") as file:
        file.write("\n")
    assert read_row(run, first) is not first


def test_a_small_curve_falls_as_the_loss_does() -> None:
    assert spark([6, 5, 4, 3, 2, 1]) == "█▇▅▄▂▁"
    assert spark([1.0]) == ""
    assert len(spark(list(range(1000)))) == 6


async def test_a_queued_run_changes_its_place_by_a_key(make_run: Any, shown: Shown) -> None:
    from engine.run.queue import queue_of

    runs = [make_run("queued", name=name) for name in ("one", "two")]
    for number, run in enumerate(runs):
        run.update_json(created=1000.0 + number, message="waits for a free device")
    root = runs[0].path.parent
    async with app_of(root).run_test(size=(100, 24)) as pilot:
        table = await listed(pilot, 2)
        assert "queued" in shown(pilot.app)
        table.at = [row.run.id for row in table.rows].index("two-0001")
        pilot.app.screen._draw()
        assert "waits for a free device" in shown(pilot.app)
        await pilot.press("less_than_sign")
        await pilot.pause()
        assert "two-0001 is number 1 of 2 in the queue" in shown(pilot.app)
        assert [run.id for run in queue_of(root)] == ["two-0001", "one-0001"]
        await pilot.press("greater_than_sign")
        await pilot.pause()
        assert [run.id for run in queue_of(root)] == ["one-0001", "two-0001"]
