"""Paths and models are browsed and completed: files, what was used before, what the hub's cache holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Input

from engine.session.browsing import Wanted, completed, files, known_of, offers
from engine.session.draft import Draft
from engine.session.recent import Recent
from workbench.app import WorkbenchApp
from workbench.crash import state_folder
from workbench.screens.browse import Browse
from workbench.screens.build import BuildScreen
from workbench.screens.listing import ListScreen
from workbench.screens.start import StartScreen

Shown = Callable[[Any], str]
TEXT = "version: 1\nmodel: {name: builtin/tiny}\ndata: {train: [{path: builtin/dates}]}\n"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache of one model and one data set."""
    root = tmp_path / "hub"
    for kind, name in (("models", "someone--small-model"), ("datasets", "someone--rows")):
        repo = root / f"{kind}--{name}"
        blob, snapshot = repo / "blobs" / "abc", repo / "snapshots" / ("0" * 40)
        blob.parent.mkdir(parents=True)
        snapshot.mkdir(parents=True)
        (repo / "refs").mkdir()
        (repo / "refs" / "main").write_text("0" * 40)
        blob.write_bytes(b"x" * 4096)
        (snapshot / "config.json").symlink_to(blob)
    import huggingface_hub.utils._cache_manager as manager

    monkeypatch.setattr(manager, "HF_HUB_CACHE", str(root))
    return root


def test_files_are_offered_by_what_they_are_asked_for(tmp_path: Path) -> None:
    tmp_path = tmp_path / "place"
    tmp_path.mkdir()
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "deep.jsonl").write_text("{}")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    for name in ("a.jsonl", "b.yaml", ".hidden.jsonl"):
        (tmp_path / name).write_text("{}")
    rows = [each.text for each in files(tmp_path, "", Wanted("rows", (".jsonl",)))]
    assert rows == ["mine", "rows", "a.jsonl"]
    assert [each.text for each in files(tmp_path, "rows/d", Wanted("rows", (".jsonl",)))] == ["rows/deep.jsonl"]
    assert [each.text for each in files(tmp_path, ".h", Wanted("rows", (".jsonl",)))] == [".hidden.jsonl"]
    models = {each.text: each.about for each in files(tmp_path, "", Wanted("model"))}
    assert models == {"mine": "a model's folder", "rows": "folder"}
    assert files(tmp_path, "nowhere/x", Wanted("path")) == []
    found = files(tmp_path, "ro", Wanted("path"))
    assert completed("ro", found) == "rows/"
    assert completed("zz", found) == "zz"


def test_models_of_the_cache_are_offered_once_with_their_size(cache: Path, tmp_path: Path) -> None:
    known = known_of(Wanted("model"), ["someone/small-model", str(tmp_path / "own")], tmp_path)
    told = {each.text: each.about for each in known}
    assert list(told) == ["someone/small-model", "own", "builtin/tiny", "builtin/tiny-vl"]
    assert told["someone/small-model"] == "used before, on this machine, 4.0 KiB"
    rows = {each.text for each in known_of(Wanted("rows"), [], tmp_path)}
    assert rows == {"builtin/dates", "builtin/shapes", "builtin/synthetic", "someone/rows"}
    assert [each.text for each in offers(tmp_path, "small some", Wanted("model"), known)] == ["someone/small-model"]


async def test_a_model_is_picked_from_what_was_used_and_what_is_cached(cache: Path, shown: Shown) -> None:
    app = WorkbenchApp(Draft(TEXT), runs_dir="runs")
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("2", "g", "enter")
        for _ in range(100):
            if isinstance(app.screen, Browse) and app.screen._known:
                break
            await pilot.pause(0.05)
        assert "someone/small-model" in shown(app)
        assert "on this machine, 4.0 KiB" in shown(app)
        line = app.screen.query_one(Input)
        assert line.size.width >= 66, "there is room for a whole path"
        line.value = ""
        await pilot.press(*"qsmall")  # letters that are commands elsewhere are text here
        await pilot.pause()
        assert line.value == "qsmall"
        assert app.draft.config.model.name == "builtin/tiny"
        line.value = "small"
        await pilot.pause()
        await pilot.press("down", "enter")
        await pilot.pause()
        assert isinstance(app.screen, BuildScreen)
        assert app.draft.config.model.name == "someone/small-model"
        await pilot.press("u")
        assert app.draft.config.model.name == "builtin/tiny"


async def test_what_is_wrong_with_a_text_is_said_while_it_is_typed(cache: Path, shown: Shown) -> None:
    app = WorkbenchApp(Draft(TEXT), runs_dir="runs")
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("2", "g", "enter")
        await pilot.pause(0.2)
        app.screen.query_one(Input).value = ""
        await pilot.pause(0.2)
        assert "must be a hub id, a folder" in shown(app)
        await pilot.press("escape")
        assert app.draft.config.model.name == "builtin/tiny"


async def test_rows_are_browsed_into_the_list_of_sources(cache: Path) -> None:
    Path("data").mkdir()
    Path("data/mine.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    app = WorkbenchApp(Draft(TEXT), runs_dir="runs")
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("3", "g", "enter")
        await pilot.pause()
        assert isinstance(app.screen, ListScreen)
        await pilot.press("ctrl+o")
        await pilot.pause(0.2)
        assert isinstance(app.screen, Browse)
        await pilot.press(*"dat", "tab")
        await pilot.pause()
        assert app.screen.query_one(Input).value == "data/"
        await pilot.press("down", "enter")
        await pilot.pause()
        assert isinstance(app.screen, ListScreen)
        await pilot.press("escape")
        await pilot.pause()
        assert [each.path for each in app.draft.config.data.train] == ["builtin/dates", "data/mine.jsonl"]


async def test_a_config_is_opened_by_browsing(tmp_path: Path) -> None:
    Path("conf").mkdir()
    Path("conf/deep.yaml").write_text(TEXT)
    Path("used.yaml").write_text(TEXT)
    Recent(state_folder()).note("used.yaml")
    app = WorkbenchApp(runs_dir=tmp_path / "none", start=True)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("o")
        await pilot.pause(0.3)
        offered = [each.text for each in app.screen._offers]
        assert sorted(offered) == ["conf", "used.yaml"], "each once"
        await pilot.press(*"con", "tab", "down", "enter")
        await pilot.pause(0.2)
        assert isinstance(app.screen, BuildScreen)
        assert app.draft.path == Path("conf/deep.yaml").absolute()
        assert not isinstance(app.screen, StartScreen)
