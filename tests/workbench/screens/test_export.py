"""The export from a finished run: forms are ticked, each is compared, what exists is not replaced, leaving cancels."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import Cancelled
from engine.export.places import forms_of
from engine.export.process import Export
from engine.run.store import RunFolder
from tests.chats import make_run
from workbench.app import WorkbenchApp
from workbench.screens.export import ExportScreen
from workbench.screens.monitor import MonitorScreen

Shown = Callable[[Any], str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.chdir(tmp_path)
    return make_run(tmp_path / "runs")


def words(app: WorkbenchApp, shown: Shown) -> str:
    return " ".join(shown(app).replace("│", " ").split())


async def until(pilot: Any, holds: Callable[[], bool], seconds: float = 100) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come about"
        await pilot.pause(0.05)


async def test_a_model_is_taken_along_and_nothing_is_replaced(run: RunFolder, shown: Shown, tmp_path: Path) -> None:
    app = WorkbenchApp(run=run, runs_dir=run.path.parent)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        assert isinstance(app.screen, MonitorScreen)
        await pilot.press("X")
        await pilot.pause()
        assert isinstance(app.screen, ExportScreen)
        await pilot.press("down", "down", "space", "f", "f", "x")
        await until(pilot, lambda: "esc back" in shown(app) and "✗ gguf" in shown(app))
        told = words(app, shown)
        assert "● gguf Q8_0" in told
        assert "✓ safetensors" in told
        assert "opened again by transformers: " in told
        assert "✗ gguf: tokenizer.json: is a tokenizer that cuts texts by rules which llama.cpp does not have" in told
        folder = tmp_path / f"{run.id}-export"
        assert [each.name for each in folder.iterdir()] == ["safetensors"]
        assert (folder / "safetensors" / "model.safetensors").is_file()
        await pilot.press("x")
        await until(pilot, lambda: "exists already" in words(app, shown))
        await pilot.press("escape")
        await pilot.pause()
        assert isinstance(app.screen, MonitorScreen)


async def test_a_run_of_all_weights_is_offered_no_adapter(
    tmp_path: Path, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = make_run(tmp_path / "runs", lora=False)
    assert list(forms_of(whole)) == ["safetensors", "gguf", "modelfile"]
    assert "adapter" in forms_of(make_run(tmp_path / "runs", name="lora"))
    app = WorkbenchApp(run=whole, runs_dir=whole.path.parent)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        await pilot.press("X")
        await pilot.pause()
        assert "○ gguf" in words(app, shown)
        assert "○ adapter" not in words(app, shown)


async def test_an_adapter_on_experts_is_asked_for_one_by_one(
    run: RunFolder, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(Export, "run", lambda export, on_message: asked.append(export.request))
    for experts in (False, True):
        if experts:
            text = run.config.read_text()
            assert "target_modules" in text
            run.config.write_text(
                text.replace("target_modules", "target_parameters: [experts.down_proj]\n  target_modules")
            )
        app = WorkbenchApp(run=run, runs_dir=run.path.parent)
        async with app.run_test(size=(80, 24)) as pilot:
            await pilot.pause()
            await pilot.press("X")
            await pilot.pause()
            assert ("e per expert" in shown(app)) == experts
            await pilot.press("space", "down", "space", "e")
            await until(pilot, lambda on=experts: ("● adapter, one for each expert" in shown(app)) == on)
            await pilot.press("x")
            await until(pilot, lambda count=experts + 1: len(asked) == count)
    assert [each["per_expert"] for each in asked] == [False, True]


async def test_leaving_cancels_what_is_not_done(run: RunFolder, shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled = threading.Event()

    def runs_for_ever(export: Export, on_message: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        on_message({"progress": {"what": "Writing", "done": 1 << 20, "total": 4 << 20, "unit": "bytes"}})
        assert cancelled.wait(60)
        raise Cancelled("Cancelled: what was being written is gone; parts that were complete are kept.")

    monkeypatch.setattr(Export, "run", runs_for_ever)
    monkeypatch.setattr(Export, "cancel", lambda export: cancelled.set())
    app = WorkbenchApp(run=run, runs_dir=run.path.parent)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        await pilot.press("X")
        await pilot.pause()
        await pilot.press("x")
        await until(pilot, lambda: "Writing" in shown(app) and "esc cancels" in shown(app))
        await pilot.press("escape")
        await until(pilot, lambda: "Cancelled: what was being written is gone" in words(app, shown))
        assert isinstance(app.screen, ExportScreen)
        await pilot.press("escape")
        await pilot.pause()
        assert isinstance(app.screen, MonitorScreen)
