"""Runs marked in the list and laid beside each other: their curves, what differs, what they answered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.run.compare import MOST
from workbench.app import WorkbenchApp
from workbench.panels import raster
from workbench.panels.chart import Chart
from workbench.panels.run_table import RunTable
from workbench.screens.compare import CompareScreen, Table
from workbench.screens.runs import RunsScreen

Shown = Callable[[Any], str]
CONFIG = "version: 1\nmodel: {{name: builtin/tiny}}\noptim: {{learning_rate: {rate}}}\nrun: {{name: {name}}}\n"


def app_of(root: Path) -> WorkbenchApp:
    app = WorkbenchApp(runs_dir=root)
    app.get_default_screen = lambda: RunsScreen(root)  # type: ignore[method-assign]
    return app


async def until(pilot: Any, test: Callable[[], bool]) -> None:
    for _ in range(600):
        if test():
            return
        await pilot.pause(0.05)
    raise AssertionError("it never came")


def two(make_run: Any, **more: Any) -> Path:
    first = make_run("finished", name="slow", config=CONFIG.format(rate=1e-4, name="slow"))
    make_run("running", steps=40, name="quick", config=CONFIG.format(rate=3e-4, name="quick"), **more)
    root: Path = first.path.parent
    return root


async def test_marked_runs_are_laid_over_each_other_with_what_differs_and_what_they_answered(
    make_run: Any, shown: Shown, writer: Any
) -> None:
    root = two(make_run)
    app = app_of(root)
    async with app.run_test(size=(80, 40)) as pilot:
        await until(pilot, lambda: "quick-0001" in shown(app))
        await pilot.press("c")
        await until(pilot, lambda: "Mark 2 to 8 runs with Space" in shown(app))
        await pilot.press("space", "c")
        await until(pilot, lambda: "1 is marked now" in shown(app))
        await pilot.press("space")
        await until(pilot, lambda: "c compare" in shown(app))
        assert shown(app).count("•") == 2
        await pilot.press("c")
        await until(pilot, lambda: isinstance(app.screen, CompareScreen) and "optim.learning_rate" in shown(app))
        text = " ".join(shown(app).split())
        lines = app.screen.query_one(Chart).curves.lines
        order = [line.name for line in lines]
        assert sorted(order) == ["quick-0001", "slow-0001"]
        rates = {"slow-0001": "0.0001", "quick-0001": "0.0003"}
        assert f"optim.learning_rate {rates[order[0]]} {rates[order[1]]}" in text
        assert "run.name" not in text
        ends = {
            words[0]: words[1:]
            for line in shown(app).splitlines()
            if (words := line.split())[:1] in (["lowest"], ["highest"])
        }
        assert all(float(low) < float(high) for low, high in zip(ends["lowest"], ends["highest"], strict=True))
        steps = {"slow-0001": "60", "quick-0001": "40"}
        assert f"step {steps[order[0]]} {steps[order[1]]}" in text
        assert "step 60: 2021-03-03" in text
        assert "step 40: 2021-03-02" in text
        await pilot.press("v")
        await until(pilot, lambda: "curve 2 of" in shown(app))
        await pilot.press("escape")
        await until(pilot, lambda: isinstance(app.screen, RunsScreen))
        assert len(app.screen.query_one(RunTable).marked) == 2
        await pilot.press("k", "k", "space")
        await until(pilot, lambda: "c compare" not in shown(app))


async def test_a_run_that_goes_on_is_followed_and_hostile_names_stay_text(
    make_run: Any, shown: Shown, writer: Any, hostile: str
) -> None:
    root = two(make_run, hostile=hostile)
    more = writer(next(run for run in _folders(root) if run.id == "quick-0001"))
    app = app_of(root)
    async with app.run_test(size=(60, 20)) as pilot:
        await until(pilot, lambda: "quick-0001" in shown(app))
        await pilot.press("space", "space", "c")
        await until(pilot, lambda: isinstance(app.screen, CompareScreen))
        more.write("metrics", 20.0, step=41, epoch=1.0, loss=0.125)
        await until(pilot, lambda: "0.125" in shown(app))
        drawn = "\n".join("".join(text for text, _ in line) for line in app.screen.query_one(Table).rendered_lines)
        assert "\x1b" not in drawn + shown(app)
        assert "\u202e" not in drawn + shown(app)


async def test_four_runs_in_sixty_columns_break_no_word_and_keep_their_signs(make_run: Any, shown: Shown) -> None:
    names = ("dates", "a-rather-long-name", "pairs", "short")
    runs = [
        make_run("finished", name=name, method=method, config=CONFIG.format(rate=1e-4 * place, name=name))
        for place, (name, method) in enumerate(zip(names, ("dpo", "sft", "dpo", "dpo"), strict=True), 1)
    ]
    app = WorkbenchApp(runs_dir=runs[0].path.parent)
    async with app.run_test(size=(60, 40)) as pilot:
        screen = CompareScreen(runs)
        app.push_screen(screen)
        await until(pilot, lambda: screen.is_mounted and "optim.learning_rate" in shown(app))
        drawn = ["".join(text for text, _ in line).rstrip() for line in screen.query_one(Table).rendered_lines]
        assert [line.split()[1] for line in drawn[:4]] == [f"{name}-0001" for name in names]
        signs = [line.split()[0] for line in drawn[:4]]
        assert any(line.split() == signs for line in drawn)
        assert any(line.split()[-4:] == ["0.0001", "0.0002", "0.0003", "0.0004"] for line in drawn)
        assert any(line.split() == [signs[1], "a-rather-long-name-0001", "step", "60:", "2021-03-03"] for line in drawn)
        # A curve that the second run lacks: the third keeps the sign that the table has it under.
        assert "rewards/margins" in {name for watch in screen._watches for name in watch.view.series}
        chart = screen.query_one(Chart)
        while chart.title != "reward margin":
            await pilot.press("v")
        assert [line.tone for line in chart.curves.lines] == [0, 2, 3]
        assert [column.tone for column in chart.curves.fetched(chart.size.width)] == [0, 2, 3]
        legend = shown(app).splitlines()[2]
        assert [legend.index(sign) for sign in (signs[0], signs[2], signs[3])]
        assert signs[1] not in legend


async def test_eight_runs_have_eight_dashes_and_signs_with_and_without_unicode(make_run: Any, shown: Shown) -> None:
    runs = [make_run("finished", name=f"rate{n}", config=CONFIG.format(rate=n, name=f"rate{n}")) for n in range(1, 9)]
    app = WorkbenchApp(runs_dir=runs[0].path.parent)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = CompareScreen(runs)
        app.push_screen(screen)
        await until(pilot, lambda: screen.is_mounted and "optim.learning_rate" in shown(app))
        drawn = ["".join(text for text, _ in line).rstrip() for line in screen.query_one(Table).rendered_lines]
        listed = [line.split() for line in drawn[:8]]
        assert [line[1] for line in listed] == [run.id for run in runs]
        assert len({line[0] for line in listed}) == MOST == 8
        assert [line.tone for line in screen.query_one(Chart).curves.lines] == list(range(8))
    assert len({*raster.STYLES}) == len({*raster.STYLE_SIGNS}) == len({*raster.STYLE_SIGNS_PLAIN}) == MOST


async def test_numbers_of_a_long_run_are_said_to_be_unfinished_until_all_of_it_is_read(
    make_run: Any, shown: Shown, monkeypatch: Any
) -> None:
    from engine.run.index import Watch

    root = two(make_run)
    app = WorkbenchApp(runs_dir=root)
    async with app.run_test(size=(80, 40)) as pilot:
        screen = CompareScreen(_folders(root))
        app.push_screen(screen)
        await until(pilot, lambda: screen.is_mounted and "optim.learning_rate" in shown(app))
        assert "reading" not in shown(app)
        monkeypatch.setattr(Watch, "poll", lambda self: True)
        screen._watches[0].loading = 0.4
        await until(pilot, lambda: "reading the whole curves, 40 %" in shown(app))
        screen._watches[0].loading = 1.0
        await until(pilot, lambda: "reading" not in shown(app))


async def test_a_config_that_cannot_be_read_is_told_and_the_curves_stand(make_run: Any, shown: Shown) -> None:
    root = two(make_run)
    next(run for run in _folders(root) if run.id == "slow-0001").config.write_text("a: [\n")
    app = app_of(root)
    async with app.run_test(size=(80, 40)) as pilot:
        await until(pilot, lambda: "quick-0001" in shown(app))
        await pilot.press("space", "space", "c")
        await until(pilot, lambda: isinstance(app.screen, CompareScreen) and "config.yaml" in shown(app))
        assert "curve 1 of" in shown(app)


def _folders(root: Path) -> list[Any]:
    from engine.run.store import runs_in

    return list(runs_in(root))
