"""A config of another tool opened in the app: the ledger first, one key takes it over, and the file stays as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import UsageError
from workbench.app import WorkbenchApp
from workbench.cli.app import _opened
from workbench.screens.build import BuildScreen
from workbench.screens.ledger import LedgerScreen

FOREIGN = "base_model: Qwen/Qwen3-8B\nsequence_len: 1024\nmicro_batch_size: 2\nlearning_rate: 1e-4\nrelora: true\n"


def shown(app: WorkbenchApp) -> str:
    return "\n".join("".join(part.text for part in strip) for strip in app.screen._compositor.render_strips())


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "theirs.yml"
    place.write_text(FOREIGN)
    return place


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_the_ledger_is_shown_and_t_takes_it_over(foreign: Path, size: tuple[int, int]) -> None:
    app = WorkbenchApp(ledger=_opened(foreign, ())[1])
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        assert isinstance(app.screen, LedgerScreen)
        words = shown(app)
        assert "1 not supported" in words
        assert "relora: true" in words
        assert "Not here yet: BAdam, APOLLO, LISA, ReLoRA" in words
        assert "t take-over" in words
        await pilot.press("t")
        await pilot.pause()
        assert isinstance(app.screen, BuildScreen)
        assert app.draft.value("model.name") == "Qwen/Qwen3-8B"
        assert app.draft.dirty
        assert app.draft.path is None
        app.draft.set("data.max_length", 512)
        await pilot.press("q")
        await pilot.pause()
        assert isinstance(app.screen, LedgerScreen)
        await pilot.press("t")
        await pilot.pause()
        assert app.draft.value("data.max_length") == 512, "what was changed since is kept"
    assert foreign.read_text() == FOREIGN


def test_a_config_of_ours_opens_without_a_ledger_and_settings_wait_for_the_new_one(
    foreign: Path, tmp_path: Path
) -> None:
    ours = tmp_path / "my.yaml"
    ours.write_text("model:\n  name: builtin/tiny\n")
    assert _opened(ours, ())[1] is None
    assert _opened(None, ()) == (None, None)
    with pytest.raises(UsageError, match="a config of Axolotl"):
        _opened(foreign, ("optim.max_steps=3",))
