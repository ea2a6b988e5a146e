"""How monitor, stop menu, list of runs and preview look, one picture a state; times and numbers are always the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from textual.widgets import Input

from engine.run import checkpoint
from engine.session.draft import Draft
from workbench.app import WorkbenchApp
from workbench.panels.run_table import RunTable
from workbench.screens import runs as runs_module
from workbench.screens.preview import PreviewScreen
from workbench.screens.runs import RunsScreen

Compare = Callable[..., bool]


@pytest.fixture(autouse=True)
def _still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Input, "cursor_blink", False)
    monkeypatch.setattr(
        checkpoint, "newest_valid", lambda folder, hashes=True: (folder.checkpoints / "checkpoint-60", [])
    )


def settle(*keys: str, ready: Callable[[Any], bool] = lambda app: True) -> Callable[[Any], Any]:
    async def run(pilot: Any) -> None:
        for _ in range(100):
            await pilot.pause(0.05)
            if ready(pilot.app):
                break
        for key in keys:
            await pilot.press(key)
            await pilot.pause()
        await pilot.app.workers.wait_for_complete()
        await pilot.pause(0.2)

    return run


def monitor(run: Any) -> WorkbenchApp:
    return WorkbenchApp(run=run, runs_dir=run.path.parent)


def test_running(snap_compare: Compare, make_run: Any) -> None:
    assert snap_compare(monitor(make_run()), terminal_size=(80, 24), run_before=settle("left", "left"))


def test_running_large_and_light(snap_compare: Compare, make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_THEME", "light")
    assert snap_compare(monitor(make_run(method="dpo")), terminal_size=(120, 40), run_before=settle())


def test_failed(snap_compare: Compare, make_run: Any) -> None:
    assert snap_compare(monitor(make_run("failed")), terminal_size=(80, 24), run_before=settle())


def test_starting(snap_compare: Compare, make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.run.phases.time", SimpleNamespace(time=lambda: 1_795_000_006.0))
    assert snap_compare(monitor(make_run("starting")), terminal_size=(80, 24), run_before=settle())


def test_stop_menu(snap_compare: Compare, make_run: Any) -> None:
    assert snap_compare(monitor(make_run(steps=67)), terminal_size=(80, 24), run_before=settle("s"))


def test_list_of_runs(snap_compare: Compare, make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    began = 1_795_000_000.0
    monkeypatch.setattr(runs_module.time, "time", lambda: began + 3600)
    monkeypatch.setattr(runs_module.time, "strftime", lambda *_: "2026-11-18 11:06")
    monkeypatch.setattr(runs_module, "LOOK_SECONDS", 3600.0)
    monkeypatch.setattr(runs_module, "size_of", lambda path: 41 << 20)
    for state in ("running", "failed", "finished", "stopped", "starting"):
        root = make_run(state, name=state, method="dpo" if state == "stopped" else "sft").path.parent
    app = WorkbenchApp(runs_dir="runs")
    app.get_default_screen = lambda: RunsScreen(root)  # type: ignore[method-assign]

    def ready(app: Any) -> bool:
        if len(app.screen.query_one(RunTable).rows) < 5:
            return False
        app.screen.runs_dir = Path("/runs")
        return True

    assert snap_compare(app, terminal_size=(80, 24), run_before=settle("o", "o", "j", ready=ready))


class Ready:
    """An inspector whose one answer is known."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.answer = answer

    def ask(self, do: str, *, on_progress: Any = None, **params: Any) -> Ready:
        return self

    done, error = True, None

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        return self.answer

    def cancel(self) -> None:
        return

    def add_done_callback(self, function: Callable[[Any], None]) -> None:
        function(self)


def tokens(*texts: str, trained: bool = False) -> list[dict[str, Any]]:
    return [{"id": 100 + len(text), "text": text, "trained": trained} for text in texts]


def preview(answer: dict[str, Any], kind: str = "sft") -> WorkbenchApp:
    Path("rows.jsonl").write_text(json.dumps({"text": "a row"}) + "\n")
    draft = Draft.new("demo")
    draft.set("method.kind", kind)
    draft.set("data.train", [{"path": str(Path("rows.jsonl").absolute())}])
    app = WorkbenchApp(draft=draft, runs_dir="runs")
    app.get_default_screen = lambda: PreviewScreen(draft, Ready(answer))  # type: ignore[method-assign]
    return app


def test_preview_of_a_chat(snap_compare: Compare) -> None:
    asked = tokens(
        "<|im_start|>", "user", "\n", "3 March", " 2021", "<|im_end|>", "\n", "<|im_start|>", "assistant", "\n"
    )
    parts = {"input": asked + tokens("2021", "-", "03", "-", "03", "<|im_end|>", trained=True) + tokens("\n")}
    turns = [{"role": "user", "start": 0, "end": 6}, {"role": "assistant", "start": 7, "end": 16}]
    row = {"index": 17, "parts": parts, "turns": turns, "truncated": False}
    answer = {"rows": [row], "total": 1000, "template": "minimind", "warnings": []}
    assert snap_compare(preview(answer), terminal_size=(80, 24), run_before=settle("number_sign", "number_sign"))


def test_preview_of_a_pair(snap_compare: Compare) -> None:
    words = tokens("Which ", "day ", "is ", "it?")
    good = tokens("It ", "is ", "Friday.", "<|im_end|>", trained=True)
    bad = tokens("It ", "is ", "perhaps ", "some ", "other ", "day.", "<|im_end|>", trained=True)
    row = {"index": 3, "parts": {"prompt": words, "chosen": good, "rejected": bad}, "truncated": False}
    answer = {"rows": [row], "total": 285, "template": None, "warnings": ["a warning about [/b] pairs"]}
    assert snap_compare(preview(answer, "dpo"), terminal_size=(80, 24), run_before=settle())
