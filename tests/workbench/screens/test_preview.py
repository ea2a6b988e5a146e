"""The preview: a raw row before any tokenizer, then what the engine says of it; nothing waits and nothing escapes."""

from __future__ import annotations

import base64
import io
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from engine.config.facts import DataFacts
from engine.config.tree import fields
from engine.errors import Cancelled, WorkbenchError
from engine.session.collector import FactsCollector
from engine.session.draft import Draft
from engine.session.rows import ASK_SECONDS
from workbench.app import WorkbenchApp
from workbench.panels.bars import fitting
from workbench.panels.tokens import TokenView
from workbench.screens.preview import PreviewScreen, histogram, lengths_text

Shown = Callable[[Any], str]


class Question:
    """An open question to an inspector that answers when the test says so."""

    def __init__(self, params: dict[str, Any], on_progress: Callable[[dict[str, Any]], None]) -> None:
        self.params, self.on_progress = params, on_progress
        self.done, self.error, self._callbacks = False, None, []
        self._value: Any = None

    def result(self, timeout: float | None = None) -> Any:
        return self._value

    def add_done_callback(self, function: Callable[[Any], None]) -> None:
        self._callbacks.append(function)

    def cancel(self) -> None:
        if not self.done:
            self.finish(error=Cancelled("cancelled"))

    def finish(self, value: Any = None, error: Any = None) -> None:
        self.done, self._value, self.error = True, value, error
        for function in self._callbacks:
            function(self)


class Slow:
    """Stands for the inspector where a test must decide when the answer comes."""

    def __init__(self) -> None:
        self.asked: list[Question] = []

    def ask(self, do: str, *, on_progress: Any = None, **params: Any) -> Question:
        assert do == "preview"
        self.asked.append(Question(params, on_progress))
        return self.asked[-1]


def batch(index: int, total: int = 40, **row: Any) -> dict[str, Any]:
    tokens = [{"id": 5, "text": f"question {index}", "trained": False}, {"id": 6, "text": "answer", "trained": True}]
    shown = {"index": index, "parts": {"input": tokens}, "truncated": False, "turns": [], **row}
    return {"method": "sft", "rows": [shown], "total": total, "template": "chatml", "warnings": []}


def draft_of(tmp_path: Path, rows: list[dict[str, Any]]) -> Draft:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    draft = Draft.new("demo")
    draft.set("data.train", [{"path": str(path)}])
    draft.unset("data.eval")
    return draft


def rows_of(count: int, text: str = "raw row") -> list[dict[str, Any]]:
    return [{"text": f"{text} {number}"} for number in range(count)]


def app_of(draft: Draft, inspector: Any) -> WorkbenchApp:
    app = WorkbenchApp(draft=draft, runs_dir="runs")
    app.get_default_screen = lambda: PreviewScreen(draft, inspector)  # type: ignore[method-assign]
    return app


async def until(pilot: Any, test: Callable[[], bool], seconds: float = 60) -> None:
    for _ in range(int(seconds * 20)):
        if test():
            return
        await pilot.pause(0.05)
    raise AssertionError("it never came")


async def asked(pilot: Any, inspector: Any, rows: dict[str, Any]) -> None:
    """Questions wait for their turn, so the newest is not there with the key press."""
    await until(pilot, lambda: inspector.asked[-1].params["rows"] == rows)


async def test_raw_rows_show_while_the_tokenizer_is_not_there(tmp_path: Path, shown: Shown) -> None:
    slow = Slow()
    app = app_of(draft_of(tmp_path, rows_of(40)), slow)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "raw row 0" in shown(app))
        assert "its tokens follow" in shown(app)
        for _ in range(3):
            await pilot.press("n")
        await pilot.pause(0.1)
        assert "raw row 3" in shown(app)
        await pilot.press("N")
        await pilot.pause(0.1)
        assert "raw row 2" in shown(app)
        await asked(pilot, slow, {"kind": "index", "index": 2})
        assert all(question.done for question in slow.asked[:-1])  # what is no longer wanted is cancelled


async def test_a_held_key_asks_now_and_then_and_last_for_the_row_in_sight(tmp_path: Path, shown: Shown) -> None:
    slow = Slow()
    app = app_of(draft_of(tmp_path, rows_of(40)), slow)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "raw row 0" in shown(app))
        began, before = time.monotonic(), len(slow.asked)
        await pilot.press(*["n"] * 30)
        assert "raw row 30" in shown(app)  # as it stands it shows at each press
        await asked(pilot, slow, {"kind": "index", "index": 30})
        assert len(slow.asked) - before <= (time.monotonic() - began) / (0.8 * ASK_SECONDS) + 2  # timers are early, too
        so_far = len(slow.asked)
        await pilot.press("n", "escape")  # a question that waits for its turn is cancelled like one under way
        await pilot.pause(2 * ASK_SECONDS)
        assert len(slow.asked) <= so_far + 1
        assert all(question.done for question in slow.asked)
        assert "cancelled" in shown(app)


async def test_a_pair_says_how_long_its_longest_side_is(tmp_path: Path, shown: Shown) -> None:
    """The two answers are held against the limit each for itself, so the sum alone would mislead."""
    slow = Slow()
    app = app_of(draft_of(tmp_path, rows_of(40)), slow)
    async with app.run_test(size=(100, 24)) as pilot:
        await until(pilot, lambda: "raw row 0" in shown(app))
        prompt, *answers = ([{"id": 5, "text": text, "trained": text != "q"}] for text in ("q", "yes", "no"))
        pair = batch(0, parts=dict(zip(("prompt", "chosen", "rejected"), (prompt, *answers), strict=True)), length=2)
        slow.asked[-1].finish(pair)
        await until(pilot, lambda: "3 tokens (longest side 2), 2 trained (67 %)" in shown(app))


async def test_tokens_take_the_place_of_the_raw_row_and_v_brings_it_back(tmp_path: Path, shown: Shown) -> None:
    slow = Slow()
    app = app_of(draft_of(tmp_path, rows_of(40)), slow)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "raw row 0" in shown(app))
        slow.asked[-1].finish(batch(0))
        await until(pilot, lambda: "question 0▌answer▐" in shown(app))
        assert "Row 0 of 40   SFT   2 tokens, 1 trained (50 %)   template chatml" in shown(app)
        assert "raw row 0" not in shown(app)
        await pilot.press("v")
        await pilot.pause(0.1)
        assert "raw row 0" in shown(app)
        await pilot.press("v", "number_sign")
        await pilot.pause(0.1)
        assert "5          6" in shown(app)


async def test_a_random_row_is_shown_at_once_and_asked_for_by_its_number(tmp_path: Path, shown: Shown) -> None:
    slow = Slow()
    app = app_of(draft_of(tmp_path, rows_of(40)), slow)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "raw row 0" in shown(app))
        slow.asked[-1].finish(batch(0))
        await pilot.pause(0.1)
        before = len(slow.asked)
        await pilot.press("r")
        await until(pilot, lambda: len(slow.asked) > before)
        index = slow.asked[-1].params["rows"]["index"]
        assert f"raw row {index}" in shown(app)


async def test_the_worst_rows_in_turn_and_that_there_is_none(tmp_path: Path, shown: Shown) -> None:
    slow = Slow()
    app = app_of(draft_of(tmp_path, rows_of(40)), slow)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "raw row 0" in shown(app))
        slow.asked[-1].finish(batch(0))
        await pilot.press("w")
        await asked(pilot, slow, {"kind": "worst", "by": "longest"})
        slow.asked[-1].on_progress({"what": "looking for the worst rows", "done": 20, "total": 40})
        await until(pilot, lambda: "looking for the worst rows: 20 of 40" in shown(app))
        slow.asked[-1].finish(batch(17, truncated=True))
        await until(pilot, lambda: "Row 17 of 40" in shown(app))
        assert "the longest row" in shown(app)
        assert f"cut at {app.draft.config.data.max_length}" in shown(app)
        await pilot.press("w")
        await asked(pilot, slow, {"kind": "worst", "by": "masked"})
        slow.asked[-1].finish({**batch(0), "rows": []})
        await until(pilot, lambda: "Every row has something to learn." in shown(app))
        assert "question 17" in shown(app)


async def test_a_search_goes_on_from_the_row_it_found(tmp_path: Path, shown: Shown) -> None:
    slow = Slow()
    app = app_of(draft_of(tmp_path, rows_of(40)), slow)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "raw row 0" in shown(app))
        await pilot.press("slash", *"row 1", "enter")
        await asked(pilot, slow, {"kind": "search", "text": "row 1", "start": 0})
        slow.asked[-1].finish(batch(10))
        await until(pilot, lambda: "holds 'row 1'" in shown(app))
        await pilot.press("slash", "enter")
        await asked(pilot, slow, {"kind": "search", "text": "row 1", "start": 11})


async def test_esc_cancels_the_question_first_and_then_goes_back(tmp_path: Path, shown: Shown) -> None:
    slow = Slow()
    draft = draft_of(tmp_path, rows_of(40))
    app = WorkbenchApp(draft=draft, runs_dir="runs")
    async with app.run_test(size=(80, 24)) as pilot:
        await app.push_screen(PreviewScreen(draft, slow))
        await pilot.pause(0.2)
        await pilot.press("escape")
        await until(pilot, lambda: "cancelled" in shown(app))
        assert slow.asked[-1].done
        assert isinstance(app.screen, PreviewScreen)
        await pilot.press("escape")
        await pilot.pause(0.1)
        assert not isinstance(app.screen, PreviewScreen)


async def test_leaving_cancels_what_is_open(tmp_path: Path) -> None:
    slow = Slow()
    draft = draft_of(tmp_path, rows_of(4))
    app = WorkbenchApp(draft=draft, runs_dir="runs")
    async with app.run_test(size=(80, 24)) as pilot:
        await app.push_screen(PreviewScreen(draft, slow))
        await pilot.pause(0.2)
        app.pop_screen()
        await pilot.pause(0.1)
    assert isinstance(slow.asked[-1].error, Cancelled)


async def test_packs_are_shown_or_their_rows(tmp_path: Path, shown: Shown) -> None:
    slow = Slow()
    draft = draft_of(tmp_path, rows_of(40))
    app = app_of(draft, slow)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "raw row 0" in shown(app))
        await pilot.press("b")
        await pilot.pause(0.1)
        assert "data.packing is off" in shown(app)
        draft.set("data.packing", True)
        await pilot.press("b")
        await until(pilot, lambda: slow.asked[-1].params["config"]["data"].get("packing") is False)
        await pilot.press("b")
        await until(pilot, lambda: slow.asked[-1].params["config"]["data"].get("packing") is True)
        slow.asked[-1].finish(batch(0, documents=[1, 1], separate=True, source_rows=[3, 9], positions=[0, 0]))
        await until(pilot, lambda: "A pack of 2 rows" in shown(app))
        assert "row 9: 1 tokens at 1, position ids from 0" in shown(app)


async def test_an_error_of_the_engine_leaves_the_raw_row_in_sight(tmp_path: Path, shown: Shown) -> None:
    slow = Slow()
    app = app_of(draft_of(tmp_path, rows_of(4)), slow)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "raw row 0" in shown(app))
        slow.asked[-1].finish(error=WorkbenchError("no such model \x1b[2J[/b]", "Check model.name."))
        await until(pilot, lambda: "no such model ␛[2J[/b]. Check model.name." in shown(app))
        assert "raw row 0" in shown(app)


async def test_hostile_rows_stay_text(tmp_path: Path, shown: Shown, hostile: str) -> None:
    slow = Slow()
    rows = [{"messages": [{"role": f"user{hostile}", "content": hostile}], hostile: hostile}]
    app = app_of(draft_of(tmp_path, rows), slow)
    async with app.run_test(size=(100, 24)) as pilot:
        await until(pilot, lambda: "␛]0;owned␇" in shown(app))
        assert "\x1b" not in shown(app)
        parts = {hostile: [{"id": 1, "text": hostile, "trained": True}]}
        slow.asked[-1].finish({**batch(0, parts=parts), "template": hostile, "warnings": [hostile]})
        await until(pilot, lambda: app.screen.query_one(TokenView).row is not None)
        await pilot.pause(0.1)
        assert "[/b][@click=app.quit]" in shown(app)
        assert "\x1b" not in shown(app)
        assert "\u202e" not in shown(app)


async def test_a_missing_and_a_broken_file_say_so(tmp_path: Path, shown: Shown) -> None:
    draft = draft_of(tmp_path, [])
    (tmp_path / "rows.jsonl").write_text('{"text": "good"}\n{"text": bad}\n')
    app = app_of(draft, Slow())
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "good" in shown(app))
        await pilot.press("n")
        # The folder of a test may be long enough to break the line within the name.
        await until(pilot, lambda: "rows.jsonl:2" in "".join(shown(app).split()))
        assert "bad" in shown(app)


async def test_prompts_are_not_called_untrained_where_the_model_writes_the_answers(
    tmp_path: Path, shown: Shown
) -> None:
    slow, draft = Slow(), draft_of(tmp_path, rows_of(4))
    draft.set(fields.method.kind.path, "grpo")
    app = app_of(draft, slow)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "raw row 0" in shown(app))
        await until(pilot, lambda: "what is trained is the model's own answers" in shown(app))
        slow.asked[-1].finish(batch(0))
        await until(pilot, lambda: "2 tokens of prompt, the model answers itself" in shown(app))
        assert "trained (" not in shown(app)


def test_a_part_of_a_line_is_whole_or_not_there() -> None:
    assert fitting(["Row 0", "2 tokens", "its own template"], 20) == "Row 0   2 tokens"
    assert fitting(["Row 0", "2 tokens"], 3) == "Row 0"


async def test_lengths_of_all_rows_are_bars_with_the_cut(tmp_path: Path, shown: Shown) -> None:
    draft = draft_of(tmp_path, rows_of(4))
    app = app_of(draft, Slow())
    async with app.run_test(size=(100, 24)) as pilot:
        await pilot.pause(0.2)
        assert "trained tokens are underlined" in shown(app)
        lengths = tuple([40] * 50 + [100] * 10 + [400])
        draft.learn(replace(draft.facts, data=DataFacts(rows=61, lengths=lengths, truncated=1, masked=3)))
        await until(pilot, lambda: "1 row longer than 128" in shown(app))
        assert "3 rows untrained" in shown(app)
        draft.set(fields.data.excess_length.path, "truncate")
        assert "1 row cut at 128" in lengths_text(draft)


def test_the_cut_stands_where_rows_are_cut() -> None:
    bars, end = histogram((10, 20, 30, 1000), 500)
    assert end == 1000
    assert bars.index("|") == 9
    assert histogram((10, 20), 500)[0].count("|") == 0


@pytest.mark.parametrize(
    "name", ["gsm8k/train_1000.jsonl", "llama-factory/alpaca_zh_demo.json", "llama-factory/wiki_demo.txt"]
)
async def test_real_rows_show_without_torch(shared_data: Path, shown: Shown, name: str) -> None:
    draft = Draft.new("demo")
    draft.set("data.train", [{"path": str(shared_data / name)}])
    draft.unset("data.eval")
    app = app_of(draft, Slow())
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "The row as it stands" in shown(app))
        for key in ("n", "r", "N"):
            await pilot.press(key)
            await pilot.pause(0.1)
            lines = shown(app).splitlines()
            assert sum(bool(line.strip()) for line in lines[3:19]) >= 1


async def test_the_real_inspector_marks_what_is_trained(tmp_path: Path, shown: Shown) -> None:
    messages = [{"role": "user", "content": "Say \x1b[31mit"}, {"role": "assistant", "content": "2021-03-03"}]
    draft = draft_of(tmp_path, [{"messages": messages}])
    app = WorkbenchApp(draft=draft, runs_dir="runs")
    app.get_default_screen = lambda: PreviewScreen(draft, app.inspector)  # type: ignore[method-assign]
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: app.screen.query_one(TokenView).row is not None, seconds=90)
        await pilot.pause(0.1)
        text = shown(app)
        assert "▌2021-03-03‹|im_end|›▐" in text
        assert "assistant   ‹|im_start|›assistant⏎" in text
        assert "Say ␛[31mit" in text
        view = app.screen.query_one(TokenView)
        trained = "".join(text for line in view.rendered_lines for text, style in line if style.startswith("trained"))
        assert trained == "2021-03-03‹|im_end|›"


async def test_beside_a_wide_form_stands_the_first_row_and_follows_the_edits_that_change_it(
    tmp_path: Path, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    slow, draft = Slow(), draft_of(tmp_path, [{"messages": chat}] * 40)
    draft.unset("optim.per_device_eval_batch_size")
    draft.set("data.packing", True)
    monkeypatch.setattr(WorkbenchApp, "inspector", property(lambda app: slow))
    monkeypatch.setattr(FactsCollector, "_ask_due", lambda self: None)
    app = WorkbenchApp(draft, runs_dir="runs")
    async with app.run_test(size=(200, 50)) as pilot:
        await until(pilot, lambda: draft.facts.model is not None)
        assert slow.asked == []  # on Goal nothing is read yet
        await pilot.press("3")
        await until(pilot, lambda: len(slow.asked) == 1)
        assert slow.asked[0].params["config"]["data"]["packing"] is False  # a row, before any pack is made
        assert "reading the first row" in shown(app)
        # Keys are answered while the question is open; what changes no row asks nothing.
        await pilot.press("4", "3")
        draft.set("optim.learning_rate", 0.5)
        app.screen.reload()
        assert app.screen.steps.step == "data"
        slow.asked[0].finish(batch(0))
        await until(pilot, lambda: "question 0" in shown(app))
        assert "SFT, 2 tokens, 1 trained (50 %), template chatml" in shown(app)
        draft.set("data.max_length", 96)
        app.screen.reload()
        await until(pilot, lambda: len(slow.asked) == 2)
        assert slow.asked[1].params["config"]["data"]["max_length"] == 96
        assert "question 0" in shown(app)  # until the answer is there
        slow.asked[1].finish(error=WorkbenchError("Row 0 is no row."))
        await until(pilot, lambda: "Row 0 is no row." in shown(app))
        await pilot.press("z")
        assert "Row 0 is no row." not in shown(app)
        await pilot.press("z")
        draft.set("data.train", [{"path": str(tmp_path / "gone.jsonl")}])
        app.screen.reload()
        await until(pilot, lambda: "The first row stands here" in shown(app))
        await pilot.resize_terminal(120, 40)
        await until(pilot, lambda: "The first row stands here" not in shown(app))
    assert all(each.done for each in slow.asked)  # one of rows that are not there was given up


async def test_an_image_is_a_picture_above_its_tokens_until_it_is_put_away(
    tmp_path: Path, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = io.BytesIO()
    Image.new("RGB", (160, 160), (200, 30, 30)).save(saved, "PNG")
    uri = "data:image/png;base64," + base64.b64encode(saved.getvalue()).decode()
    image = {"name": "cat.png", "width": 160, "height": 160, "tokens": 9, "start": 3, "end": 12, "thumbnail": uri}
    monkeypatch.setenv("WORKBENCH_IMAGES", "blocks")
    slow = Slow()
    app = app_of(draft_of(tmp_path, rows_of(40)), slow)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: bool(slow.asked))
        slow.asked[-1].finish(batch(0, images=[image]))
        await until(pilot, lambda: "▀" * 16 in shown(app))
        text = shown(app)
        assert text.index("image cat.png") < text.index("▀") < text.index("question 0")
        assert sum("▀" in line for line in text.splitlines()) == 8
        view = app.screen.query_one(TokenView)
        pixel = next(part.style for part in view.render_line(2) if part.text.startswith("▀"))
        assert (pixel.color.name, pixel.bgcolor.name) == ("#c81e1e", "#c81e1e")
        await pilot.press("i")
        await until(pilot, lambda: "▀" not in shown(app))
        assert "image cat.png" in shown(app)
        await pilot.press("i")
        await until(pilot, lambda: "▀" in shown(app))
