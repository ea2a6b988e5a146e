"""What the guided first run says of rows and of a rehearsal, by the events of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config.facts import DataFacts, Facts
from engine.hardware import Machine
from engine.rules import read
from engine.run.view import RunView, fold
from engine.session.first_run import PAGES, FirstRun
from engine.session.guided_rehearsal import ROWS, examine, judge

QUESTIONS = [{"prompt": f"What is {number} and one?", "completion": f"It is {number + 1}."} for number in range(6)]


def written(place: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> str:
    (place / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def happened(*, answers: dict[str, str], losses: list[float], end: str = "", accuracy: float = 0.5) -> RunView:
    """A rehearsal by its events: each question answered at its last step."""
    step = len(losses)
    events: list[dict[str, Any]] = [{"kind": "run", "max_steps": 200}]
    events += [
        {"kind": "metrics", "step": number + 1, "loss": loss, "mean_token_accuracy": accuracy}
        for number, loss in enumerate(losses)
    ]
    for at, text in ((0, "??"), (step, None)):
        events += [
            {"kind": "sample", "step": at, "index": number, "prompt": prompt, "completion": text or answer}
            for number, (prompt, answer) in enumerate(answers.items())
        ]
    if end:
        events.append({"kind": end, "step": step, "cause": "it broke"})
    framed = [
        {"v": 1, "seq": number, "t": 100.0 + number, "segment": 0, **event} for number, event in enumerate(events)
    ]
    return fold(RunView(), framed)


def test_rows_are_read_as_questions_and_answers(tmp_path: Path) -> None:
    found = examine(written(tmp_path, QUESTIONS), tmp_path)
    assert found.problem == ""
    assert found.rows == 6
    assert [(each.prompt, each.answer) for each in found.pinned] == [
        (row["prompt"], row["completion"]) for row in QUESTIONS[:3]
    ]
    assert found.contradicting == 0


def test_a_question_with_two_answers_is_told_and_never_asked(tmp_path: Path) -> None:
    rows = [*QUESTIONS, {"prompt": QUESTIONS[0]["prompt"], "completion": "Nobody knows."}]
    found = examine(written(tmp_path, rows), tmp_path)
    assert found.contradicting == 2
    assert QUESTIONS[0]["prompt"] not in [each.prompt for each in found.pinned]
    first = FirstRun(None, rows="rows.jsonl", base=tmp_path)  # type: ignore[arg-type]
    first.examined = found
    assert any("no model can know both" in block.text for block in first.page("rows"))


def test_a_system_turn_is_no_question_alone(tmp_path: Path) -> None:
    turns = [("system", "Be kind."), ("user", "Hello?"), ("assistant", "Good day.")]
    rows = [{"messages": [{"role": role, "content": text} for role, text in turns]}] * 3
    found = examine(written(tmp_path, rows), tmp_path)
    assert found.problem == ""
    assert found.pinned == ()
    view = happened(answers={}, losses=[6.0] * 12, accuracy=0.995)
    assert judge(view, found).state == "learned"
    assert judge(happened(answers={}, losses=[6.0] * 12, accuracy=0.9), found).state == "learning"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("gone.jsonl", None, "no such file"),
        ("one.jsonl", '{"prompt": "a", "completion": "b"}\n', "at least 2 rows are needed; it has 1"),
        (
            "text.jsonl",
            '{"text": "Only words."}\n{"text": "And more."}\n',
            "row 1 holds no question with an answer in words, but plain text. For such rows",
        ),
        ("broken.jsonl", '{"prompt": "a", "completion": "b"}\n{"prom', "broken.jsonl"),
        ("table.parquet", "PAR1", "the guided run reads JSON, JSONL and CSV files; this is .parquet"),
    ],
)
def test_rows_that_cannot_be_rehearsed_are_one_sentence(
    tmp_path: Path, name: str, text: str | None, words: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    found = examine(name, tmp_path)
    assert words in found.problem
    assert "\n" not in found.problem


@pytest.mark.parametrize(
    ("answers", "losses", "end", "accuracy", "state", "page", "words"),
    [
        ("right", [6.0, 0.3], "", 0.9, "learned", "", "answers all 3 questions word for word"),
        ("right", [6.0, 0.3], "stopped", 0.9, "learned", "", "answers all 3 questions word for word"),
        ("wrong", [6.0, 3.0], "", 0.5, "learning", "", "step 2"),
        ("wrong", [6.0, 5.8], "finished", 0.1, "failed", "rows", "has not fallen (6.00 at first, 5.80 at the end)"),
        ("long", [6.0, 0.3], "finished", 0.9, "failed", "tokens", "does not stop"),
        ("wrong", [6.0, 0.1], "finished", 1.0, "failed", "tokens", "answers otherwise when asked"),
        ("wrong", [6.0, 2.0], "finished", 0.6, "failed", "rows", "does not know the rows yet"),
        ("wrong", [6.0, 2.0], "stopped", 0.6, "failed", "rehearsal", "was stopped at step 2"),
        ("wrong", [6.0, 2.0], "failed", 0.6, "failed", "rehearsal", "it broke"),
    ],
)
def test_a_rehearsal_is_judged_by_what_was_answered(
    tmp_path: Path, answers: str, losses: list[float], end: str, accuracy: float, state: str, page: str, words: str
) -> None:
    found = examine(written(tmp_path, QUESTIONS), tmp_path)
    made = {"right": "{}", "long": "{} And so on and", "wrong": "No."}[answers]
    given = {each.prompt: made.format(each.answer) for each in found.pinned}
    verdict = judge(happened(answers=given, losses=losses, end=end, accuracy=accuracy), found)
    assert (verdict.state, verdict.page) == (state, page)
    assert words in verdict.message


def test_rows_that_were_known_once_stay_so_though_a_later_answer_is_another(tmp_path: Path) -> None:
    found = examine(written(tmp_path, QUESTIONS), tmp_path)
    view = happened(answers={each.prompt: each.answer for each in found.pinned}, losses=[6.0, 0.3], end="stopped")
    later = {"v": 1, "seq": 99, "t": 200.0, "segment": 0, "kind": "sample", "step": 3, "index": 0}
    view = fold(view, [{**later, "prompt": found.pinned[0].prompt, "completion": "No."}])
    assert judge(view, found).state == "learned"
    first = FirstRun(None, rows="rows.jsonl", base=tmp_path)  # type: ignore[arg-type]
    first.examined = found
    told = [row for block in first.page("rehearsal", view=view) for row in block.rows]
    assert ("step 2", found.pinned[0].answer) in told
    assert "No." not in [text for _, text in told]


def test_rows_that_may_be_left_out_for_their_length_are_asked_last(tmp_path: Path) -> None:
    long = [{"prompt": f"Tell tale {number}.", "completion": "so " * 800} for number in range(3)]
    middle = [{"prompt": f"Tell much of {number}.", "completion": "and " * 120} for number in range(2)]
    found = examine(written(tmp_path, [*long, *middle, *QUESTIONS]), tmp_path)
    assert [each.prompt for each in found.pinned] == [row["prompt"] for row in QUESTIONS[:3]]
    few = examine(written(tmp_path, [*long, *middle, QUESTIONS[0]], "few.jsonl"), tmp_path)
    assert [each.prompt for each in few.pinned] == [QUESTIONS[0]["prompt"], *(row["prompt"] for row in middle)]


def test_rows_that_are_all_too_long_are_refused_by_name(tmp_path: Path) -> None:
    rows = [{"prompt": f"Tell {number}.", "completion": "once upon a time " * 1200} for number in range(4)]
    found = examine(written(tmp_path, rows), tmp_path)
    assert "each answer of the first 4 rows is longer than the 1,024 tokens a rehearsal reads" in found.problem


@pytest.mark.parametrize(("words", "time"), [(1, "about half a minute"), (90, "one to two minutes")])
def test_how_long_the_built_in_model_takes_is_told_by_the_answers(tmp_path: Path, words: int, time: str) -> None:
    first = FirstRun(None, rows="rows.jsonl", base=tmp_path)  # type: ignore[arg-type]
    rows = [{"prompt": f"Number {number}?", "completion": "one " * words} for number in range(4)]
    first.examined = examine(written(tmp_path, rows), tmp_path)
    assert any(time in block.text for block in first.page("rehearsal"))


def test_the_rehearsal_is_a_config_without_errors_and_the_real_run_takes_all_rows(tmp_path: Path) -> None:
    first = FirstRun(None, rows=written(tmp_path, QUESTIONS), base=tmp_path)  # type: ignore[arg-type]
    first.examined = examine("rows.jsonl", tmp_path)
    draft = first.rehearsal()
    assert [finding for finding in draft.findings if finding.severity == "error"] == []
    assert draft.value("data.train")[0]["rows"] == ROWS
    real = first.real()
    # Of 24 rows an epoch is three steps: checkpoints every so many steps would not come.
    assert [finding.path for finding in read(real.mapping, Facts(data=DataFacts(rows=24))).findings] == []
    assert (real.value("run.saves_per_epoch"), real.value("run.evals_per_epoch")) == (1, 1)
    assert real.value("data.train") == [{"path": str(tmp_path / "rows.jsonl")}]
    assert real.value("data.val_set_size") == 0.1
    assert real.value("run.prompts") == [row["prompt"] for row in QUESTIONS[:3]]


def test_of_many_tokens_the_marks_of_the_template_are_shown_and_spaces_are_told_from_borders() -> None:
    first = FirstRun(None)  # type: ignore[arg-type]
    read = ["<start>", "user", "\n", *[f" word{number}" for number in range(60)], "<end>", "<start>", "assistant"]
    tokens = [{"id": number, "text": text, "trained": False} for number, text in enumerate(read)]
    end = [{"id": 99, "text": "Yes", "trained": True}, {"id": 3, "text": "\n", "trained": False}]
    first.row = {"parts": {"input": [*tokens, *end]}}
    page = first.page("tokens")
    rows = [row for block in page for row in block.rows]
    assert rows[1:] == [("learned", "‹Yes›"), ("read", "‹⏎›")]  # in the order of the row
    shown = rows[0][1]
    assert shown.startswith("‹<start>› ‹user› ‹⏎› ‹␣word0› ")
    assert shown.endswith(" ‹<end>› ‹<start>› ‹assistant›")
    assert " … " in shown
    assert any(block.text == "␣ is a space, ⏎ is a line break." for block in page)


def test_every_page_says_something_before_anything_is_known() -> None:
    first = FirstRun(None)  # type: ignore[arg-type]
    for page in PAGES:
        assert any(block.text for block in first.page(page)), page
    machine = Machine(cpu_count=2, memory_bytes=8 << 30)
    assert any("There is no GPU" in block.text for block in first.page("machine", machine))
