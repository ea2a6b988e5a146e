"""The guided first run in a notebook, by messages: its pages, other rows, a rehearsal, and the config it leads to."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.errors import WorkbenchError
from engine.run.store import RunFolder
from engine.session.first_run import PAGES, FirstRun
from engine.session.start import GUIDED
from tests.widgets.conftest import Written
from widgets import Workbench

ROWS = [(f"What is {number} and one?", f"It is {number + 1}.") for number in range(4)]


def ask(face: Workbench, do: str, **params: Any) -> dict[str, Any]:
    answer = face.answer({"id": "1", "do": do, **params}).data
    assert answer["ok"], answer
    return dict(answer)


def until(face: Workbench, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The guide's state once it holds; a view asks in the same way."""
    give_up = time.monotonic() + 60
    while not holds(state := ask(face, "guide")):
        assert time.monotonic() < give_up, state
        time.sleep(0.02)
    return state


def words(state: dict[str, Any]) -> str:
    return " ".join(
        [
            *(block.get("text", "") for block in state["blocks"]),
            *(str(block.get("rows", "")) for block in state["blocks"]),
        ]
    )


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    text = "".join(json.dumps({"prompt": prompt, "completion": answer}) + "\n" for prompt, answer in ROWS)
    (tmp_path / "mine.jsonl").write_text(text)
    learned = {"id": 7, "text": "It", "trained": True}
    parts = {"input": [{"id": 1, "text": "What", "trained": False}, learned, {**learned, "id": 2, "text": "<end>"}]}
    monkeypatch.setattr(FirstRun, "ask_tokens", lambda first, then: then({"parts": parts}))
    return "mine.jsonl"


@pytest.fixture
def face(rows: str, tmp_path: Path) -> Iterator[Workbench]:
    made = Workbench(runs=tmp_path / "runs", fresh=True)
    yield made
    made.close()


def test_the_guide_leads_from_own_rows_over_a_rehearsal_to_the_config_of_the_real_run(
    face: Workbench, rows: str, written: Callable[..., Written], monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearsal = written(name="rehearsal", max_steps=200)
    asked: list[str] = []
    monkeypatch.setattr(FirstRun, "launch", lambda first: rehearsal.folder)
    monkeypatch.setattr("engine.run.control.request", lambda folder, do, by: asked.append(f"{folder.id} {do}"))
    assert ask(face, "guide_offer")["title"] == GUIDED.title
    state = until(face, lambda state: "cores" in words(state))
    assert [page["id"] for page in state["pages"]] == list(PAGES)
    assert "blocks" not in ask(face, "guide", mark=state["mark"])
    ask(face, "guide_go", at=2)
    until(face, lambda state: "builtin/dates: the first 24 of 24,000 rows" in words(state))
    ask(face, "guide_rows", path="gone.jsonl")
    gone = until(face, lambda state: "no such file" in words(state))
    assert gone["onward"] == "rows"
    ask(face, "guide_rows", path=rows)
    until(face, lambda state: "mine.jsonl: the first 4" in words(state))
    state = ask(face, "guide_go", at=3)
    assert "The first row: 3 tokens, 2 of them learned" in words(state)
    assert "mask" in [word for word, _ in state["terms"]]
    assert ask(face, "guide_go", at=4)["onward"] == "rehearse"
    assert ask(face, "guide_begin")["going"]
    state = until(face, lambda state: bool(state["run"]))
    assert (state["run"], state["onward"]) == (rehearsal.folder.id, "next")
    for step, ready in ((0, False), (10, False), (20, True)):
        if step:
            rehearsal.pen.write("metrics", step=step, loss=2.0 / step, mean_token_accuracy=0.5)
        for index, (prompt, answer) in enumerate(ROWS[:3]):
            rehearsal.pen.write("sample", step=step, index=index, prompt=prompt, completion=answer if ready else "?")
    state = until(face, lambda state: "word for word" in words(state))
    assert "It is 1." in words(state)
    ask(face, "guide")
    assert asked == [f"{rehearsal.folder.id} save_stop"]
    assert not state["chats"]
    rehearsal.pen.write("checkpoint", step=20, path="checkpoints/checkpoint-20", state="committed", bytes=1)
    rehearsal.pen.write("stopped", step=20, seconds=1.0, by="the guided first run")
    assert until(face, lambda state: state["chats"])["question"] == ROWS[0][0]
    assert "loss" in [entry["name"] for entry in ask(face, "watch", run=state["run"])["parts"]["names"]]
    assert "overfitting" in words(ask(face, "guide_go", at=5))
    before = face.draft.text()
    assert "asks" not in ask(face, "guide_config")
    assert face.draft.value("data.train") == [{"path": str(Path(rows).absolute())}]
    assert ask(face, "state")["step"] == "model"
    ask(face, "undo")
    assert face.draft.text() == before


def test_another_goal_becomes_the_config_in_the_form(face: Workbench) -> None:
    state = ask(face, "guide_go", at=1)
    assert [goal["id"] for goal in state["choices"] if goal["here"]] == ["answer"]
    assert state["onward"] == "next"
    state = ask(face, "guide_choose", goal="prefer")
    assert (state["onward"], [goal["id"] for goal in state["choices"] if goal["here"]]) == ("goal", ["prefer"])
    assert not face.answer({"id": "1", "do": "guide_choose", "goal": "fly"}).data["ok"]
    ask(face, "guide_config")
    assert face.draft.recipe == "dpo"
    assert ask(face, "guide_go", at=2)["choices"] == []


def test_the_cell_run_again_is_at_the_page_and_the_rehearsal_of_before(
    face: Workbench, rows: str, tmp_path: Path, written: Callable[..., Written], monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearsal = written(name="rehearsal")
    monkeypatch.setattr(FirstRun, "launch", lambda first: rehearsal.folder)
    ask(face, "guide_rows", path=rows)
    ask(face, "guide_go", at=4)
    until(face, lambda state: state["onward"] == "rehearse")
    ask(face, "guide_begin")
    until(face, lambda state: bool(state["run"]))
    again = Workbench(runs=tmp_path / "runs")
    state = until(again, lambda state: "starting" in words(state) or "step" in words(state))
    assert (state["page"], state["rows"], state["run"]) == ("rehearsal", rows, rehearsal.folder.id)
    again.close()


def test_a_start_that_fails_is_said_and_a_config_of_ones_own_is_not_replaced_unasked(
    face: Workbench, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(first: FirstRun) -> RunFolder:
        raise WorkbenchError("The disk is full: 4 MiB are needed.")

    monkeypatch.setattr(FirstRun, "launch", refuse)
    ask(face, "guide_rows", path=rows)
    ask(face, "guide_go", at=4)
    until(face, lambda state: state["onward"] == "rehearse")
    ask(face, "guide_begin")
    state = until(face, lambda state: "The disk is full: 4 MiB are needed." in words(state))
    assert state["onward"] == "rehearse"
    assert not face.answer({"id": "1", "do": "guide_rows", "path": " "}).data["ok"]
    (tmp_path / "mine.yaml").write_text("version: 1\nmodel: {name: builtin/tiny}\n")
    mine = Workbench(tmp_path / "mine.yaml", runs=tmp_path / "runs")
    asks = ask(mine, "guide_config")["asks"]
    assert "mine.yaml" in asks
    assert mine.draft.value("model.name") == "builtin/tiny"
    assert not mine.draft.dirty
    ask(mine, "guide_config", sure=True)
    assert mine.draft.value("data.train") == [{"path": "builtin/dates"}]
    mine.close()
