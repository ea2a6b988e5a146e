"""Groups of completions in the notebook's monitor: told as a list, asked for one by one, whole and safe to show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.run.rollouts import Completion, Group, RolloutFile
from widgets import Monitor


def completion(text: str, reward: float, advantage: float, **more: Any) -> Completion:
    rewards = {"exact_match": reward, "format": None}
    return Completion(text, len(text), rewards, reward, advantage, more.get("cut_off", False))


@pytest.fixture
def rolled(written: Callable[..., Any]) -> Any:
    """A run that announces groups, and the monitor of it."""
    run = written()
    file = RolloutFile(run.folder)
    monitor = Monitor(run.folder)

    def roll(step: int, *completions: Completion, prompt: str = "When?", replayed_from: int | None = None) -> int:
        payload = file.add(Group(step, 0, 7, prompt, "2021-03-03", completions, replayed_from))
        assert payload is not None
        run.pen.write("rollout", **payload)
        return payload["offset"]

    yield run, monitor, roll
    monitor.close()
    file.close()


def ask(monitor: Monitor, do: str, **params: Any) -> dict[str, Any]:
    return monitor.answer({"id": "1", "do": do, "run": monitor.run.id, **params}).data


def test_a_run_without_groups_has_no_such_page(written: Callable[..., Any]) -> None:
    monitor = Monitor(written().folder)
    assert ask(monitor, "watch")["parts"]["head"]["rollouts"] is False
    monitor.close()


def test_the_load_of_experts_is_a_page_of_mixtures_alone(written: Callable[..., Any]) -> None:
    run = written()
    monitor = Monitor(run.folder)
    assert ask(monitor, "watch")["parts"]["head"]["experts"] is False
    run.pen.write("experts", load=["5550", "9050"], layers=[1, 2])
    told = ask(monitor, "watch", page="experts")["parts"]
    assert told["head"]["experts"] is True
    assert told["experts"]["picture"] == "1 ▄▄▄· 1\n2 █·▄· 2"
    assert "four times as many" in told["experts"]["words"]
    monitor.close()


def test_groups_are_listed_newest_first_and_one_is_brought_whole(rolled: Any) -> None:
    _, monitor, roll = rolled
    roll(1, completion("no idea", 0.0, 0.0))
    offset = roll(2, completion("2021-03-03", 1.0, 0.7), completion("so many words", 0.0, -0.7, cut_off=True))
    told = ask(monitor, "watch", page="rollouts")["parts"]
    assert told["head"]["rollouts"] is True
    assert [(each["step"], each["count"], each["cut"]) for each in told["rollouts"]] == [(2, 2, 1), (1, 1, 0)]
    assert told["rollouts"][0]["offset"] == offset
    group = ask(monitor, "group", offset=offset)
    assert (group["prompt"], group["answer"], group["functions"]) == ("When?", "2021-03-03", ["exact_match", "format"])
    assert [each["text"] for each in group["completions"]] == ["2021-03-03", "so many words"]
    assert [each["rewards"] for each in group["completions"]] == [[1.0, None], [0.0, None]]
    assert [each["advantage"] for each in group["completions"]] == [0.7, -0.7]
    assert [each["cut"] for each in group["completions"]] == [False, True]


def test_a_replay_is_told_from_new_answers(rolled: Any) -> None:
    _, monitor, roll = rolled
    roll(1, completion("2021-03-03", 1.0, 0.7))
    offset = roll(2, completion("2021-03-03", 1.0, 0.7), replayed_from=1)
    told = ask(monitor, "watch", page="rollouts")["parts"]["rollouts"]
    assert [(each["step"], each["replayed"]) for each in told] == [(2, 1), (1, None)]
    assert ask(monitor, "group", offset=offset)["replay"].startswith("Replayed: the model of step 1 gave these answers")
    assert ask(monitor, "group", offset=told[1]["offset"])["replay"] == ""


def test_many_groups_a_step_do_not_fill_the_comm(rolled: Any) -> None:
    """Four looks a second at a run of five groups a step stay far below the limit of the comm."""
    _, monitor, roll = rolled
    sent = 0
    marks: dict[str, int] = {}
    for step in range(8):
        for _ in range(5):
            roll(step, *[completion("x" * 3000, 0.0, 0.0)] * 8, prompt="long " * 400)
        answer = monitor.answer({"id": "1", "do": "watch", "run": monitor.run.id, "page": "rollouts", "marks": marks})
        marks |= answer.data.get("marks", {})
        sent += len(str(answer.data.get("parts", {}).get("rollouts", "")))
    assert sent < 12_000
    newest = monitor.view.rollouts[-1]["offset"]
    assert len(str(ask(monitor, "group", offset=newest))) < 20_000


@pytest.mark.parametrize("offset", [10**12, 3, -1, "0", None])
def test_only_a_group_that_the_run_announced_is_read(rolled: Any, offset: object) -> None:
    _, monitor, roll = rolled
    roll(1, completion("a", 1.0, 0.0))
    answer = ask(monitor, "group", offset=offset)
    assert answer["ok"] is False
    assert answer["error"]


def test_a_group_whose_file_is_gone_or_hostile_is_a_sentence_or_text(rolled: Any) -> None:
    run, monitor, roll = rolled
    offset = roll(1, completion("\x1b]0;owned\x07\u202etext", 1.0, 0.0), prompt="\x1b[2J")
    group = ask(monitor, "group", offset=offset)
    assert "\x1b" not in str(group)
    assert "\u202e" not in group["completions"][0]["text"]
    Path(run.folder.samples / "rollouts.jsonl").unlink()
    assert "not kept any more" in ask(monitor, "group", offset=offset)["error"]
