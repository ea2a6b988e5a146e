"""Monitor, list of runs and preview: what a person sees of a run's folder, and what their keys do to it."""

from __future__ import annotations

import json

import pytest

from engine.config.draft import Draft
from engine.run.events import EventWriter
from engine.run.store import create
from workbench.app import WorkbenchApp
from workbench.panels.chart import Chart
from workbench.panels.watching import Numbers, PostMortem, RunBar
from workbench.screens.preview import PreviewScreen, TokenView
from workbench.screens.runs import RunTable

HOSTILE = "\x1b]0;owned\x07[/b][@click=app.quit]\u202e"


def make_run(root, *, end="finished", steps=40, name="dates"):
    """A run folder as a worker leaves it."""
    run = create(root, "version: 1\n", {"name": name, "method": "sft", "model": "builtin/tiny"})
    with EventWriter(run) as writer:
        writer.write("phase", name="Loading")
        writer.write("receipt", entries=[{"feature": "adapter", "requested": "lora", "effective": "lora", "count": 14}])
        writer.write("started", method="sft", model="builtin/tiny", max_steps=steps, epochs=1, keep_every=1)
        for step in range(1, steps + 1):
            writer.write("metrics", step=step, epoch=step / steps, loss=4 / step, grad_norm=1.0, learning_rate=1e-3)
        writer.write("sample", step=steps, index=0, prompt=f"3 March {HOSTILE}", completion="2021-03-03")
        writer.write("checkpoint", step=20, path="checkpoint-20", bytes=1 << 20, seconds=0.5, state="committed")
        if end == "failed":
            writer.write("failed", cause="cuda_oom", message=f"The GPU ran out of memory {HOSTILE}", lines=["line one"])
        elif end:
            writer.write(end, step=steps, seconds=3.0, by="me")
    run.update_json(state=end or "running")
    return run


def text_of(app) -> str:
    """Everything on screen."""
    return "\n".join("".join(part.text for part in line) for line in app.screen._compositor.render_strips(app.size))


async def test_a_finished_run_shows_its_state_its_curve_and_its_newest_numbers(tmp_path):
    run = make_run(tmp_path)
    app = WorkbenchApp(run=run, runs_dir=tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.6)
        shown = text_of(app)
        assert "finished" in shown
        assert "step 40 of 40" in shown
        assert "0.100" in shown
        assert app.screen.query_one("#main", Chart).values_at_cursor() is None
        await pilot.press("left")
        step, _, values = app.screen.query_one("#main", Chart).values_at_cursor()
        assert values[0][0] == "loss"
        assert values[0][1] == pytest.approx(4 / step, rel=0.2)


async def test_a_failed_run_opens_on_its_cause_and_the_way_on(tmp_path):
    app = WorkbenchApp(run=make_run(tmp_path, end="failed"), runs_dir=tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.6)
        assert app.screen.query_one(PostMortem).display
        shown = text_of(app)
        assert "ran out of memory" in shown
        assert "R goes on from step 20" in shown


async def test_the_stop_menu_leaves_exactly_one_request(tmp_path):
    run = make_run(tmp_path, end="")
    app = WorkbenchApp(run=run, runs_dir=tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.6)
        await pilot.press("s")
        await pilot.pause(0.3)
        await pilot.press("enter")
        await pilot.pause(0.3)
    asked = [json.loads(path.read_text()) for path in run.control.glob("*.json")]
    assert [request["do"] for request in asked] == ["save_stop"]


async def test_pages_change_and_hostile_text_stays_text(tmp_path):
    app = WorkbenchApp(run=make_run(tmp_path), runs_dir=tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        for key, words in (("2", "2021-03-03"), ("4", "adapter"), ("5", "version: 1"), ("1", "loss")):
            await pilot.press(key)
            await pilot.pause(0.2)
            shown = text_of(app)
            assert words in shown
            assert "\x1b" not in shown
            assert "\u202e" not in shown


async def test_the_monitor_draws_nothing_while_nothing_happens(tmp_path):
    app = WorkbenchApp(run=make_run(tmp_path), runs_dir=tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(1.2)
        before = app.screen.query_one("#main", Chart).draws
        await pilot.pause(1.5)
        assert app.screen.query_one("#main", Chart).draws == before


async def test_runs_are_listed_filtered_opened_and_deleted_only_when_confirmed(tmp_path):
    first, second = make_run(tmp_path), make_run(tmp_path, end="failed", name="other")
    app = WorkbenchApp(runs_dir=tmp_path, screen="runs")
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(1.0)
        table = app.screen.query_one(RunTable)
        assert {row.run.id for row in table.rows} == {first.id, second.id}
        await pilot.press("slash")
        await pilot.press(*"other")
        await pilot.press("enter")
        await pilot.pause(0.3)
        assert [row.run.id for row in table.rows] == [second.id]
        await pilot.press("D")
        await pilot.pause(0.3)
        await pilot.press("enter")
        await pilot.pause(0.3)
        assert second.path.is_dir()
        await pilot.press("D")
        await pilot.pause(0.3)
        await pilot.press("down", "enter")
        await pilot.pause(0.5)
        assert not second.path.exists()
        assert first.path.is_dir()


async def test_an_empty_list_says_how_to_begin(tmp_path):
    app = WorkbenchApp(runs_dir=tmp_path / "none", screen="runs")
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.8)
        assert "workbench demo" in text_of(app)


async def test_every_state_has_a_word_of_its_own(tmp_path):
    from workbench.panels.glyphs import STATES

    assert len({look.word for look in STATES.values()}) == len(STATES) == 8
    assert len({look.glyph for look in STATES.values()}) == 8
    assert RunBar is not Numbers


async def test_the_preview_marks_what_is_learned(tmp_path):
    rows = tmp_path / "rows.jsonl"
    messages = [{"role": "user", "content": f"Say {HOSTILE}"}, {"role": "assistant", "content": "2021-03-03"}]
    rows.write_text(json.dumps({"messages": messages}) + "\n")
    draft = Draft.new("demo")
    draft.set("data.train", [{"path": str(rows)}])
    draft.unset("data.eval")
    app = WorkbenchApp(draft=draft, runs_dir=tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        app.push_screen(PreviewScreen(draft, app.inspector))
        await pilot.pause(0.5)
        assert "2021-03-03" in text_of(app)  # raw rows stand there before any token
        for _ in range(120):
            await pilot.pause(0.5)
            if app.screen.query_one(TokenView).rows:
                break
        view = app.screen.query_one(TokenView)
        learned = "".join(token["text"] for token in view.rows[0]["parts"]["input"] if token["trained"])
        assert learned == "2021-03-03<|im_end|>"
        assert "".join(text for line in view.made for text, style in line if style == "learned") == learned
        assert "\x1b" not in text_of(app)
