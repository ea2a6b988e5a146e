"""Columns picked by keys: three rows follow at once, and the config says so afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.session.column_map import ColumnMap
from engine.session.draft import Draft
from tests.engine.session.test_column_map import ask
from workbench.app import WorkbenchApp
from workbench.screens.columns import ColumnsScreen

Shown = Callable[[Any], str]


async def test_keys_pick_the_columns_and_three_rows_follow(tmp_path: Path, shown: Shown) -> None:
    rows = [{"frage": f"{n} + {n}?", "antwort": f"makes {2 * n}"} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    draft = Draft.new("demo")
    draft.set("data.train", [{"path": str(tmp_path / "rows.jsonl")}])
    draft.unset("data.eval")
    app = WorkbenchApp(draft=draft, runs_dir="runs")
    columns, answers = ColumnMap(draft, ask), []
    async with app.run_test(size=(80, 30)) as pilot:
        app.push_screen(ColumnsScreen(columns), answers.append)
        await pilot.pause()
        assert "fit no known format" in shown(app)
        while columns.format != "prompt_completion":
            await pilot.press("right")
        await pilot.press("down", "right", "down", "right", "right")
        await pilot.pause()
        text = shown(app)
        assert [f"{n} + {n}?" in text and f"makes {2 * n}" in text for n in range(4)] == [True, True, True, False]
        assert "enter keeps it" in text
        await pilot.press("enter")
        await pilot.pause()
    assert answers == [True]
    assert columns.columns == {"prompt": "frage", "completion": "antwort"}


async def test_what_rows_hold_reaches_no_terminal_raw(tmp_path: Path, shown: Shown) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"\x1b[31mprompt": "\x1b]0;x\x07", "[b]": "‮"}) + "\n")
    draft = Draft.new("demo")
    draft.set("data.train", [{"path": str(tmp_path / "rows.jsonl"), "columns": {"text": "\x1b[31mprompt"}}])
    draft.unset("data.eval")
    app = WorkbenchApp(draft=draft, runs_dir="runs")
    async with app.run_test(size=(80, 30)) as pilot:
        app.push_screen(ColumnsScreen(ColumnMap(draft, ask)))
        await pilot.pause()
        text = shown(app)
    assert "\x1b" not in text
    assert "‮" not in text
    assert "␛[31mprompt" in text
