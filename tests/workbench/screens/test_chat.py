"""The chat's screen: writing while a model loads, answers beside each other, the rendered prompt, rows, and nothing left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.client import Ticket
from engine.run.store import RunFolder
from engine.session.chat import ChatSession, who_answers
from engine.session.conversation import Answer, Settings, Turn
from tests.chats import QUESTION, make_run
from workbench.app import WorkbenchApp
from workbench.screens.chat import ChatScreen
from workbench.screens.monitor import MonitorScreen

Shown = Callable[[Any], str]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return make_run(tmp_path / "runs")


class Silent(ChatSession):
    """A session whose model is there at once and says what a test lets it say."""

    def load(self) -> Any:
        self.loaded = {"sides": [{"template": True, "device": "cpu"} for _ in self.who], "models": 1, "bytes": 0}
        self._now("ready", "")


async def until(pilot: Any, holds: Callable[[], bool], seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come about"
        await pilot.pause(0.05)


async def test_one_writes_while_it_loads_and_the_process_goes_with_the_screen(
    run: RunFolder, shown: Shown, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = ChatSession(who_answers([run]), Settings(max_new_tokens=12), device="cpu")
    load = session.load

    def load_slowly() -> Ticket:
        """It stands still until a person has written."""
        ticket = load()
        os.kill(session.pid or 0, signal.SIGSTOP)
        return ticket

    monkeypatch.setattr(session, "load", load_slowly)
    app = WorkbenchApp(chat=session, runs_dir=tmp_path / "runs")
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.pause()
        assert session.state == "loading"
        assert "…" in shown(app)
        await pilot.press(*QUESTION, "enter")
        assert f"you  {QUESTION}" in shown(app), "what waits is in view"
        assert "esc take back" in shown(app)
        await pilot.press("escape")
        assert f"> {QUESTION}" in shown(app)
        assert "you  " not in shown(app)
        await pilot.press("enter", *"next")
        assert f"you  {QUESTION}" in shown(app)
        assert "what you sent waits for it" in shown(app)
        assert "> next" in shown(app)
        pid = session.pid
        assert pid is not None
        os.kill(pid, signal.SIGCONT)
        await until(pilot, lambda: bool(session.conversation.turns) and session.state == "ready")
        await pilot.pause(0.3)
        words = shown(app)
        assert QUESTION in words
        assert f"{run.id} checkpoint 10" in words
        assert "base builtin/tiny" in words
        assert "> next" in words, "what was being written stays"
        await pilot.press("ctrl+t")
        await until(pilot, lambda: "<|im_start|>assistant" in shown(app), 60)
        assert "tokens" in shown(app)
        await pilot.press("escape", "ctrl+s")
        await pilot.pause()
        await pilot.press("enter")
        await pilot.pause()
        (saved,) = Path.cwd().glob("chat-*.jsonl")
        rows = [json.loads(line) for line in saved.read_text("utf-8").splitlines()]
        assert [row["messages"][0] for row in rows] == [{"role": "user", "content": QUESTION}] * 2
        await pilot.press("escape")
    end = time.monotonic() + 10
    while psutil.pid_exists(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid)


async def test_what_waits_for_a_model_whose_process_ends_is_in_the_line_again(run: RunFolder, shown: Shown) -> None:
    session = Silent(who_answers([run]), device="cpu")
    app = WorkbenchApp(chat=session)
    async with app.run_test(size=(80, 24)) as pilot:
        session._now("loading", "Starting")
        await pilot.press(*QUESTION, "enter", *"next")
        session._now("ready", "")
        await until(pilot, lambda: "the chat's process has ended" in " ".join(shown(app).split()))
        assert f"> {QUESTION}next" in shown(app)
        assert "you  " not in shown(app)


@pytest.mark.parametrize("size", [(80, 24), (200, 50)])
async def test_what_a_model_says_is_drawn_and_never_obeyed(
    run: RunFolder, shown: Shown, hostile: str, size: tuple[int, int]
) -> None:
    session = Silent(who_answers([run]), device="cpu")
    app = WorkbenchApp(chat=session)
    async with app.run_test(size=size) as pilot:
        said = [Answer(f"{hostile}\n    indented", 3, True, "length", result={"seconds": 1.0}), Answer("half", 1)]
        session.conversation.turns.append(Turn(f"hello {hostile}", said))
        session._changed()
        await pilot.pause(0.3)
        words = shown(app)
        assert "\x1b" not in words
        assert "\u202e" not in words
        assert "␛]0;owned" in words
        assert "    indented" in words
        assert "half▌" in words
        assert "max_new_tokens" in words
        line = next(line for line in words.splitlines() if "base builtin/tiny" in line and "│" in line)
        assert line.index("checkpoint 10") < line.index("│") < line.index("base")


async def test_a_question_that_is_ready_to_be_asked_stands_in_the_line_and_the_way_back_is_shown(
    run: RunFolder, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    session = Silent(who_answers([run]), device="cpu")
    monkeypatch.setattr(session, "send", asked.append)
    app = WorkbenchApp(runs_dir=run.path.parent, start=True)
    async with app.run_test(size=(80, 24)) as pilot:
        app.push_screen(ChatScreen(session, "How old is the ferry?"))
        await pilot.pause()
        assert "> How old is the ferry?" in shown(app)
        assert "esc back" in shown(app).splitlines()[-1]
        await pilot.press("space", "enter")
        await pilot.pause()
        assert asked == ["How old is the ferry? "]


async def test_settings_are_held_to_their_bounds(run: RunFolder, shown: Shown) -> None:
    session = Silent(who_answers([run]), device="cpu")
    app = WorkbenchApp(chat=session)
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.press("ctrl+o")
        await pilot.pause()
        await pilot.press("enter")
        await pilot.pause()
        await pilot.press("backspace", "backspace", "backspace", *"-1", "enter")
        await pilot.pause()
        assert "temperature: must be a number from 0 to 100; got -1" in shown(app)
        assert session.conversation.settings.temperature == 0
        await pilot.press("ctrl+o")
        await pilot.pause()
        await pilot.press("enter")
        await pilot.pause()
        await pilot.press("backspace", "backspace", "backspace", *"0.7", "enter")
        await pilot.pause()
        assert session.conversation.settings.temperature == 0.7
        assert "temperature 0.7" in shown(app)


async def test_a_key_leads_from_a_finished_run_to_its_chat(
    make_run: Callable[..., RunFolder], run: RunFolder, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.screens.chat.ChatSession", Silent)
    config = "version: 1\nmodel: {name: builtin/tiny}\nmethod: {kind: sft}\n"
    finished = make_run("finished", config=config, name="bare")
    shutil.rmtree(finished.checkpoints)
    app = WorkbenchApp(run=finished)
    async with app.run_test(size=(140, 40)) as pilot:
        await pilot.pause()
        assert "C chat" in shown(app)
        await pilot.press("C")
        await pilot.pause()
        assert isinstance(app.screen, MonitorScreen)
        assert "no whole checkpoint to talk to" in shown(app)
    # The same run's folder with a checkpoint.
    run.checkpoints.rename(finished.checkpoints)
    app = WorkbenchApp(run=finished)
    async with app.run_test(size=(140, 40)) as pilot:
        await pilot.pause()
        await pilot.press("C")
        await pilot.pause()
        assert isinstance(app.screen, ChatScreen)
        await pilot.press("escape")
        await pilot.pause()
        assert isinstance(app.screen, MonitorScreen)
    # From the lists that name it, too.
    for start in (True, False):
        app = WorkbenchApp(runs_dir=finished.path.parent, start=start)
        async with app.run_test(size=(140, 40)) as pilot:
            if not start:
                app.action_show("runs")
            await until(pilot, lambda app=app: finished.id in shown(app))  # type: ignore[misc]
            if start:
                await pilot.press("g")
                while app.screen.table.chosen.key != finished.id:
                    await pilot.press("j")
            await pilot.press("C")
            await pilot.pause()
            assert isinstance(app.screen, ChatScreen)


async def test_a_whole_answer_is_not_scrolled_away_by_the_noise_beside_it(run: RunFolder, shown: Shown) -> None:
    session = Silent(who_answers([run]), device="cpu")
    app = WorkbenchApp(chat=session)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: session.state == "ready")
        tuned, base = Answer(), Answer()
        session.conversation.turns.append(Turn("When was it?", [tuned, base]))
        tuned.text, tuned.done = "1994-10-13", True
        for _ in range(3):
            base.text += "twenty " * 60
            session._changed()
            await pilot.pause(0.1)
            assert "1994-10-13" in shown(app)
        # Whoever scrolls on is left there.
        await pilot.press("tab", "end")
        base.text, base.done = f"{base.text}THEEND", True
        session._changed()
        await until(pilot, lambda: "THEEND" in shown(app), 20)
