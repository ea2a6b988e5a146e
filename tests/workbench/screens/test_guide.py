"""The guided first run in the app: pages are turned, other rows taken, the rehearsal followed and asked to stop once."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from textual import events
from textual.pilot import Pilot

from engine.errors import WorkbenchError
from engine.run.store import RunFolder
from engine.session.first_run import PAGES, FirstRun
from tests.workbench.screens.conftest import Writer
from workbench.app import WorkbenchApp
from workbench.screens.build import BuildScreen
from workbench.screens.guide import GuideScreen
from workbench.screens.monitor import MonitorScreen

ROWS = [(f"What is {number} and one?", f"It is {number + 1}.") for number in range(4)]


def shown(app: WorkbenchApp) -> str:
    return "\n".join("".join(part.text for part in strip) for strip in app.screen._compositor.render_strips())


async def until(pilot: Pilot[Any], holds: Callable[[], bool]) -> None:
    for _ in range(600):
        await pilot.pause(0.05)
        if holds():
            return
    raise AssertionError(shown(pilot.app))  # type: ignore[arg-type]


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    text = "".join(json.dumps({"prompt": prompt, "completion": answer}) + "\n" for prompt, answer in ROWS)
    (tmp_path / "mine.jsonl").write_text(text)
    token = {"id": 7, "text": "It", "trained": True}
    row = {
        "parts": {"input": [{"id": 1, "text": "What", "trained": False}, token, {**token, "id": 2, "text": "<end>"}]}
    }
    monkeypatch.setattr(FirstRun, "ask_tokens", lambda first, then: then(row))
    return "mine.jsonl"


@pytest.mark.parametrize("size", [(80, 24), pytest.param((200, 50), marks=pytest.mark.slow)])
async def test_the_guide_leads_to_a_rehearsal_that_is_stopped_once_and_to_a_config(
    rows: str, size: tuple[int, int], make_run: Callable[..., RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("starting", name="rehearsal")
    asked: list[str] = []
    monkeypatch.setattr(FirstRun, "launch", lambda first: run)
    monkeypatch.setattr("engine.run.control.request", lambda folder, do, by: asked.append(f"{folder.id} {do}"))
    app = WorkbenchApp(runs_dir=run.path.parent)
    async with app.run_test(size=size) as pilot:
        app.action_show("guide")
        await until(pilot, lambda: "1 of 6" in shown(app) and "cores" in shown(app))
        screen = app.screen
        assert isinstance(screen, GuideScreen)
        await pilot.press("enter", "enter")
        await until(pilot, lambda: "builtin/dates: the first 24 of 24,000 rows" in shown(app))
        await pilot.press("r")
        await pilot.pause()
        await pilot.press("ctrl+u", *"mine.jsonl", "enter")
        await until(pilot, lambda: "mine.jsonl: the first 4" in shown(app))
        await pilot.press("enter")
        await until(pilot, lambda: "The first row: 3 tokens, 2 of them learned" in shown(app))
        assert "‹It› ‹<end>›" in shown(app)
        await pilot.press("t")
        await pilot.pause()
        assert "chat template:" in shown(app)
        await pilot.press("escape", "enter", "enter")
        await until(pilot, lambda: screen.guide.view is not None)
        assert "enter next" in shown(app)
        writer = Writer(run)
        writer.write("started", 1, method="sft", model="builtin/tiny", max_steps=200)
        for step, loss, ready in ((0, 0.0, False), (10, 2.0, False), (20, 0.1, True)):
            if step:
                writer.write("metrics", step, step=step, loss=loss, mean_token_accuracy=0.5)
            for index, (prompt, answer) in enumerate(ROWS[:3]):
                writer.write("sample", step, step=step, index=index, prompt=prompt, completion=answer if ready else "?")
        await until(pilot, lambda: "word for word" in shown(app))
        await asyncio.sleep(0.6)
        assert asked == [f"{run.id} save_stop"]
        assert "It is 1." in shown(app)
        await pilot.press("o")
        await pilot.pause()
        assert isinstance(app.screen, MonitorScreen)
        await pilot.press("q")
        await pilot.press("enter")
        await until(pilot, lambda: "overfitting" in shown(app))
        await pilot.press("enter")
        await pilot.pause()
        assert isinstance(app.screen, BuildScreen)
        assert app.draft.value("data.train") == [{"path": str(Path(rows).absolute())}]
        assert app.draft.dirty


async def test_another_goal_than_answers_leads_to_a_new_config_for_it(rows: str) -> None:
    app = WorkbenchApp()
    async with app.run_test(size=(80, 24)) as pilot:
        app.action_show("guide")
        await pilot.press("enter")
        await until(pilot, lambda: "› Teach it to answer like my examples" in shown(app))
        assert "Make a judge that scores answers" in shown(app)
        assert "enter next" in shown(app)
        await pilot.press("up", "down", "k", "j", "j", "k")  # ends are no way round
        await until(pilot, lambda: "› Prefer some answers over others" in shown(app))
        assert "pairs of a better and a worse answer" in shown(app)
        assert "enter new-config" in shown(app)
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, BuildScreen))
        assert app.draft.recipe == "dpo"
        assert "What is known of this model" in shown(app)  # the next question, not the review


async def test_keys_that_come_in_one_burst_choose_a_goal_and_go_on_with_it(rows: str) -> None:
    app = WorkbenchApp()
    async with app.run_test(size=(80, 24)) as pilot:
        app.action_show("guide")
        await pilot.press("enter")
        await until(pilot, lambda: "› Teach it to answer like my examples" in shown(app))
        for key in ("down", "enter"):  # both are there before the first is answered
            app.post_message(events.Key(key, None))
        await until(pilot, lambda: isinstance(app.screen, BuildScreen))
        assert app.draft.recipe == "dpo"


async def test_a_long_answer_of_several_lines_is_shown_in_them_and_newest_answers_need_no_scrolling(
    rows: str, make_run: Callable[..., RunFolder], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answer = (
        "First we add the two.\nThen we take away the three that were lost on the way home.\n#### 72 " + "again " * 40
    )
    long = [{"prompt": f"{number}: " + "How many are left of all? " * 8, "completion": answer} for number in range(3)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in long))
    run = make_run("starting", name="rehearsal")
    monkeypatch.setattr(FirstRun, "launch", lambda first: run)
    app = WorkbenchApp(runs_dir=run.path.parent)
    async with app.run_test(size=(80, 24)) as pilot:
        app.action_show("guide")
        await pilot.pause()
        screen = app.screen
        assert isinstance(screen, GuideScreen)
        screen.guide.take("long.jsonl")
        screen._go(PAGES.index("rows"))
        await until(pilot, lambda: "long.jsonl: the first 3" in shown(app))
        assert re.search(r"^ +Then we take away", shown(app), re.MULTILINE)
        screen._go(PAGES.index("rehearsal"))
        await pilot.press("enter")
        await until(pilot, lambda: screen.guide.view is not None)
        writer = Writer(run)
        writer.write("started", 1, method="sft", model="builtin/tiny", max_steps=300)
        for step, text in ((0, "noise " * 60), (10, "We add. " * 60)):
            writer.write("sample", step, step=step, index=0, prompt=long[0]["prompt"], completion=text)
            writer.write("metrics", step + 1, step=step + 1, loss=2.0)
        await until(pilot, lambda: "step 10" in shown(app))
        assert "step 11 of at most 300: loss 2.000" in shown(app)
        assert "at first" in shown(app)


async def test_what_is_wrong_with_rows_or_with_the_start_is_said_and_another_way_offered(
    rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(first: FirstRun) -> RunFolder:
        raise WorkbenchError("The disk is full: 4 MiB are needed.")

    monkeypatch.setattr(FirstRun, "launch", refuse)
    app = WorkbenchApp()
    async with app.run_test(size=(80, 24)) as pilot:
        app.action_show("guide")
        await pilot.pause()
        screen = app.screen
        assert isinstance(screen, GuideScreen)
        screen.guide.take("gone.jsonl")
        screen._go(PAGES.index("rows"))
        await until(pilot, lambda: "no such file" in " ".join(shown(app).split()))
        await pilot.press("enter")  # asks for other rows instead of going on without any
        await pilot.pause()
        assert "Your rows" in shown(app)
        await pilot.press("escape")
        screen.guide.take(rows)
        await until(pilot, lambda: "mine.jsonl: the first 4" in shown(app))
        screen._go(PAGES.index("rehearsal"))
        await pilot.press("enter")
        await until(pilot, lambda: "The disk is full: 4 MiB are needed." in shown(app))
        assert "enter rehearse" in shown(app)
