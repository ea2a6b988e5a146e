"""The page of groups: one prompt, the answers that the model gave to it, and what each was worth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from engine.run.rollouts import Completion, Group, RolloutFile
from workbench.app import WorkbenchApp

Shown = Callable[[Any], str]


def group(step: int, *rewards: float, prompt: str = "What is 3 March 2021 in ISO form?", text: str = "") -> Group:
    mean = sum(rewards) / len(rewards)
    answers = [
        Completion(
            text or f"answer {step}.{place}",
            7,
            {"exact_match": reward, "format": None},
            reward,
            reward - mean,
            place == 1,
        )
        for place, reward in enumerate(rewards)
    ]
    return Group(step, 0, 17, prompt, "2021-03-03", answers)


async def until(pilot: Any, test: Callable[[], bool]) -> None:
    for _ in range(600):
        if test():
            return
        await pilot.pause(0.05)
    raise AssertionError("it never came")


@pytest.fixture
def run(make_run: Any, writer: Any) -> Any:
    """A GRPO run that goes on, with a function that writes one more group."""
    made = make_run(method="grpo")
    file, events = RolloutFile(made), writer(made)

    def add(*groups: Group) -> None:
        for each in groups:
            payload = file.add(each)
            assert payload is not None
            events.write("rollout", 12.0 + each.step, **payload)

    made.add = add
    yield made
    file.close()


async def test_each_answer_of_a_group_stands_with_its_rewards_and_what_it_was_worth(run: Any, shown: Shown) -> None:
    run.add(group(40, 1.0, 0.0, 1.0, 0.0))
    app = WorkbenchApp(run=run, runs_dir=run.path.parent)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.2)
        await pilot.press("7")
        await until(pilot, lambda: "answer 40.0" in shown(app))
        text = shown(app)
    for words in (
        "group 1 of 1   step 40   row 17   4 answers",
        "reward 0.500 ± 0.58   1 of 4 cut off",
        "What is 3 March 2021 in ISO form?",
        "reference: 2021-03-03",
        "▲ advantage +0.50   exact_match 1   format -   reward 1   7 tokens",
        "▼ advantage -0.50",
        "7 tokens   cut off",
        "  answer 40.3",
    ):
        assert words in text, words


async def test_a_replay_is_said_to_be_one_and_new_answers_are_followed(run: Any, shown: Shown) -> None:
    run.add(group(10, 1.0, 0.0), group(20, 0.0, 0.0), replace(group(20, 1.0, 0.0, text="again"), replayed_from=10))
    app = WorkbenchApp(run=run, runs_dir=run.path.parent)
    async with app.run_test(size=(120, 24)) as pilot:
        await pilot.pause(0.2)
        await pilot.press("7")
        await until(pilot, lambda: "group 2 of 3" in shown(app) and "answer 20.0" in shown(app))
        assert "Replayed" not in shown(app)
        await pilot.press("n")
        await until(pilot, lambda: "Replayed: the model of step 10 gave these answers" in shown(app))
        assert "again" in shown(app)
        await pilot.press("N")
        await until(pilot, lambda: "group 2 of 3" in shown(app))
        run.add(group(30, 0.0, 1.0))
        await until(pilot, lambda: "answer 30.0" in shown(app))  # the newest of new answers is followed again


async def test_the_newest_group_is_followed_until_an_older_one_is_looked_at(run: Any, shown: Shown) -> None:
    run.add(group(10, 1.0, 0.0), group(20, 0.5, 0.5))
    app = WorkbenchApp(run=run, runs_dir=run.path.parent)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.2)
        await pilot.press("7")
        await until(pilot, lambda: "answer 20.0" in shown(app))
        assert "± 0   all the same, so nothing is learnt from them" in shown(app)
        await pilot.press("N")
        await until(pilot, lambda: "answer 10.0" in shown(app) and "group 1 of 2" in shown(app))
        run.add(group(30, 0.0, 1.0))
        await until(pilot, lambda: "group 1 of 3" in shown(app))
        assert "answer 10.0" in shown(app)  # who reads is not pulled away
        await pilot.press("N")
        await until(pilot, lambda: "This is the oldest group that is kept." in shown(app))
        await pilot.press("n", "n")
        await until(pilot, lambda: "answer 30.0" in shown(app))
        run.add(group(40, 0.0, 1.0))
        await until(pilot, lambda: "answer 40.0" in shown(app))


async def test_answers_stand_side_by_side_where_there_is_room(run: Any, shown: Shown) -> None:
    run.add(group(40, 1.0, 0.0))
    app = WorkbenchApp(run=run, runs_dir=run.path.parent)
    async with app.run_test(size=(120, 36)) as pilot:
        await pilot.pause(0.2)
        await pilot.press("7")
        await until(pilot, lambda: "answer 40.1" in shown(app))
        lines = shown(app).splitlines()
        assert any("advantage +0.50" in line and "advantage -0.50" in line for line in lines)
        assert "…" not in shown(app)


async def test_hostile_answers_stay_text(run: Any, shown: Shown, hostile: str) -> None:
    run.add(group(40, 1.0, 0.0, prompt=hostile, text=hostile))
    app = WorkbenchApp(run=run, runs_dir=run.path.parent)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.2)
        await pilot.press("7")
        await until(pilot, lambda: "␛]0;owned␇␛[31m[/b][@click=app.quit]x[/]\\u202e" in shown(app))
        assert not set("\x1b\x07\u202e") & set(shown(app))


async def test_without_groups_the_page_says_why(make_run: Any, run: Any, shown: Shown) -> None:
    for given, words in ((make_run(), "SFT learns from answers that are in the data"), (run, "No group yet")):
        app = WorkbenchApp(run=given, runs_dir=given.path.parent)
        async with app.run_test(size=(80, 24)) as pilot:
            await pilot.pause(0.2)
            await pilot.press("7")
            await until(pilot, lambda app=app, words=words: words in shown(app))  # type: ignore[misc]


async def test_answers_whose_file_is_gone_say_so(run: Any, shown: Shown) -> None:
    run.add(group(40, 1.0, 0.0))
    (run.samples / "rollouts.jsonl").unlink()
    app = WorkbenchApp(run=run, runs_dir=run.path.parent)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.2)
        await pilot.press("7")
        await until(pilot, lambda: "are not in the run's folder any more" in shown(app))
        assert "What is 3 March 2021 in ISO form?" in shown(app)
