"""A template as it is typed: the row follows, what is odd is said, and saving lets the config name the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from textual.widgets import TextArea

from engine.session.draft import Draft
from engine.session.template import TemplateEditing
from tests.tickets import Answered
from workbench.app import WorkbenchApp
from workbench.screens.preview import PreviewScreen
from workbench.screens.template import TemplateScreen

Shown = Callable[[Any], str]
OWN = "{% for m in messages %}{{ m.content }}{% endfor %}"


class Writes:
    """Stands for the inspector: what a template writes is its own text, of which one may be broken or odd."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def ask(self, do: str, *, on_progress: Any = None, **params: Any) -> Answered:
        if do != "rendered":
            return Answered({"method": "sft", "rows": [], "total": 9, "template": "", "warnings": []})
        self.asked.append(params)
        text = OWN if params["text"] is None else params["text"]
        found = {"row": params["row"], "name": "this template", "text": text, "of_source": False, "asked": "<go>"}
        tokens = [{"id": 7, "text": f"says {text.split()[-1]}", "trained": True}]
        turns = [] if "broken" in text else [{"role": "assistant", "tokens": tokens}]
        flaws = ["This row learns no end token."] if "odd" in text else []
        problem = "it is broken" if "broken" in text else ""
        return Answered(found | {"turns": turns, "flaws": flaws, "problem": problem, "tokens": 1, "trained": 1})


async def until(pilot: Any, test: Callable[[], bool]) -> None:
    for _ in range(200):
        if test():
            return
        await pilot.pause(0.05)
    raise AssertionError("it never came")


async def test_the_row_follows_what_is_typed_and_the_config_names_what_is_saved(tmp_path: Path, shown: Shown) -> None:
    draft = Draft.new("demo")
    draft.save(tmp_path / "my.yaml")
    writes = Writes()
    app = WorkbenchApp(draft=draft, runs_dir="runs")
    async with app.run_test(size=(120, 30)) as pilot:
        app.push_screen(TemplateScreen(TemplateEditing(draft, writes.ask, row=3), lambda change: change()))
        await until(pilot, lambda: "endfor %}" in shown(app))
        area = app.screen.query_one(TextArea)
        assert area.text == OWN
        assert "before an answer it writes" in shown(app)
        area.insert(" odd", area.document.end)
        await until(pilot, lambda: "learns no end token" in shown(app))
        assert writes.asked[-1]["text"] == f"{OWN} odd"
        assert "says odd" in shown(app)
        area.insert(" broken", area.document.end)
        await until(pilot, lambda: "it is broken" in shown(app))
        assert "says odd" in shown(app), "the last row that could be written stays"
        await pilot.press("ctrl+n")
        await until(pilot, lambda: writes.asked[-1]["row"] == 4)
        await pilot.press("ctrl+s", "enter")
        await until(pilot, lambda: "it cannot write row 4" in shown(app))
        area.text = f"{OWN} good"
        await until(pilot, lambda: "says good" in shown(app))
        await pilot.press("escape")
        await until(pilot, lambda: "changed and not saved" in shown(app))
        await pilot.press("enter", "ctrl+s", "enter")
        await until(pilot, lambda: "model.chat_template is" in shown(app))
    assert (tmp_path / "template.jinja").read_text() == f"{OWN} good"
    assert draft.config.model.chat_template == "./template.jinja"


async def test_the_preview_opens_it_at_its_row(shown: Shown) -> None:
    writes, draft = Writes(), Draft.new("demo")
    app = WorkbenchApp(draft=draft, runs_dir="runs")
    app.get_default_screen = lambda: PreviewScreen(draft, writes)  # type: ignore[method-assign, arg-type, return-value]
    async with app.run_test(size=(80, 40)) as pilot:
        app.screen._at = 5  # type: ignore[attr-defined]
        await pilot.press("t")
        await until(pilot, lambda: isinstance(app.screen, TemplateScreen) and bool(writes.asked))
        assert writes.asked[-1]["row"] == 5
        await pilot.press("escape")
        await until(pilot, lambda: isinstance(app.screen, PreviewScreen))
