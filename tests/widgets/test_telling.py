"""What a monitor says of a run, part by part: which answers and groups are shown, what can be done with it."""

from __future__ import annotations

import pytest

from engine.config.tree import fields
from engine.run.series import Series
from engine.run.view import RunView
from engine.session.build import BuildSession
from engine.session.draft import Draft
from widgets import pages, telling
from widgets.curves import entries
from widgets.workbench import _why


def test_the_first_answer_to_a_prompt_stays_below_the_newest() -> None:
    view = RunView()
    for step in range(0, 80, 10):
        view.samples += [{"prompt": prompt, "step": step, "completion": f"at {step}"} for prompt in ("When?", "Who?")]
    when, who = telling.samples(view)
    assert [at for at, _ in when["answers"]] == ["step 70", "step 60", "step 50", "step 40", "step 30", "before"]
    assert when["answers"][0] == ["step 70", "at 70"]
    assert who["answers"] == when["answers"]


def test_blanks_are_no_words_and_damaged_events_are_told_as_in_the_app() -> None:
    view = RunView(samples=[{"prompt": "When?", "step": 3, "completion": " \n"}], bad_lines=2)
    assert telling.samples(view)[0]["answers"] == [["step 3", "no words"]]
    assert telling.group({"completions": [{"text": ""}]})["completions"][0]["text"] == "no words"
    told = telling.head(view)
    assert told["warnings"] == ["2 damaged lines in events.jsonl were passed over"]
    assert told["empty"]["samples"] == "No samples. Set run.prompts to see answers change while the model learns."


def test_a_large_group_says_how_many_completions_are_left_out() -> None:
    stored = {"prompt": "When?", "completions": [{"text": str(number)} for number in range(20)]}
    told = telling.group(stored)
    assert (len(told["completions"]), told["left"]) == (16, 4)
    assert telling.group({**stored, "completions": stored["completions"][:3]})["left"] == 0


@pytest.mark.parametrize(
    ("state", "resumable", "controls", "says"),
    [
        ("running", False, True, ""),
        ("finished", False, False, ""),
        ("stopped", True, False, ""),
        ("failed", True, False, "the disk is full"),
        ("lost", True, False, "the disk is full"),
    ],
)
def test_what_a_state_can_be_asked_for_and_when_its_time_is_told(
    state: str, resumable: bool, controls: bool, says: str
) -> None:
    view = RunView(state=state, cause="the disk is full", started=10.0, ended=15.0, updated=15.0, segment_began=10.0)
    view.checkpoints = [{"step": 3, "state": "committed"}]
    told = telling.head(view)
    assert told["chats"] is (state != "running")
    assert (told["resumable"], bool(told["controls"]), told["cause"]) == (resumable, controls, says)
    assert (told["took"] is None) is (state == "running")
    assert _why(view) == ("" if state in ("finished", "stopped") else "the disk is full")


def test_a_held_out_curve_is_drawn_into_its_twin_and_no_curve_into_itself() -> None:
    view = RunView(method="sft")
    view.series = {name: Series() for name in ("mine", "eval_mine", "eval_alone")}
    assert {entry["name"]: entry["with"] for entry in entries(view)} == {
        "mine": "",
        "eval_mine": "mine",
        "eval_alone": "",
    }


def test_a_step_counts_what_is_to_mend_and_else_what_is_to_look_at() -> None:
    def asked(do: str, **params: object) -> None:
        raise AssertionError("nothing is to be asked here")

    session = BuildSession(Draft.new("demo"), asked)  # type: ignore[arg-type]
    draft, rate = session.draft, fields.optim.learning_rate.path

    def said() -> tuple[str, str, str]:
        (step,) = (each for each in pages.steps(session, draft.findings) if each["id"] == "method")
        return step["mark"], step["kind"], step["words"]

    draft.unset("optim.max_steps")
    assert said() == ("✓", "ok", "nothing to mend")
    draft.set(rate, 5.0)
    assert said() == ("?", "hint", "1 to look at")
    draft.set(rate, -1)
    assert said() == ("✗", "error", "1 to mend")
    session.close()


def test_a_long_value_is_cut_with_a_sign() -> None:
    assert pages._short("x" * 80) == "x" * 80
    assert pages._short("x" * 81) == "x" * 79 + "…"
