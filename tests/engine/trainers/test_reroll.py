"""Prompts on which every answer failed come back later, the same ones after a resume and on every process."""

from __future__ import annotations

import json

import pytest
import torch

from engine.trainers import reroll
from engine.trainers.reroll import Reroll, failed_groups
from tests.engine.trainers.conftest import CONVERSATIONS, lines
from tests.engine.trainers.test_grpo import GRPO, curve, same_after_a_resume

# Answers to prompts whose number three divides get nothing, whatever they are.
HARD = """
import zlib


def hard(completions, answer):
    texts = [messages[-1]["content"] for messages in completions]
    numbers = [int(each.split()[0]) - 1 for each in answer]
    return [
        0.0 if number % 3 == 0 else zlib.crc32(text.encode()) % 7 / 7
        for text, number in zip(texts, numbers, strict=True)
    ]
"""


def settings_of(folder, source):
    (folder / "hard.py").write_text(HARD)
    return {
        **GRPO, "method.reward_funcs": [f"{folder}/hard.py:hard"], "data.train": [{"path": source(CONVERSATIONS)}],
        "method.reroll_start_fraction": 0.5, "method.reroll_max_groups": 2, "optim.max_steps": 6,
    }  # fmt: skip


def test_failed_prompts_come_back_in_the_second_half_in_the_order_in_which_they_failed(train, source, tmp_path):
    run = train({**settings_of(tmp_path, source), "method.rollout_groups": 8})
    asked: dict[int, list[int]] = {}
    for event in lines(run, "rollout"):
        asked.setdefault(event["step"], []).append(event["row"])
    failed = [row for step in (1, 2, 3) for row in asked[step] if row % 3 == 0]
    assert len(failed) > 2
    back = [row for step in (4, 5, 6) for row in asked[step][-2:]]
    assert back[: len(failed)] == failed[:6]
    assert not {row for step in (1, 2, 3) for row in asked[step]} & {
        row for step in (4, 5, 6) for row in asked[step][:-2]
    }
    assert curve(run, "reroll/groups")[:3] == [0, 0, 0]
    assert curve(run, "reroll/groups")[3] == 2
    loss = next(entry for entry in lines(run, "receipt")[0]["entries"] if entry["feature"] == "loss")
    assert "every answer failed come back behind 50% of the steps, each at most 4 times" in loss["detail"]


def test_resuming_equals_never_stopping(train, source, tmp_path):
    """What waited at the checkpoint comes back after it."""
    same_after_a_resume(train, settings_of(tmp_path, source), tmp_path)


def rows(*numbers):
    return [{"row": number, "prompt": json.dumps(f"{number}?")} for number in numbers]


def test_each_waits_once_and_the_oldest_give_way(monkeypatch):
    waiting = Reroll(0.5, 2, 4)
    waiting.keep(rows(4, 4, 5, 5, 6, 6), 0, [True, False, True], 2)
    waiting.keep(rows(6, 6, 7, 7), 0, [True, True], 2)
    assert [row["row"] for row in waiting.waiting] == [4, 6, 7]
    assert (waiting.is_due(4, 10), waiting.is_due(5, 10)) == (False, True)
    taken = waiting.instead(rows(1, 1, 2, 2, 3, 3), 0, 6, 2)
    assert [row["row"] for row in taken] == [1, 1, 4, 4, 6, 6]
    monkeypatch.setattr(reroll, "WAITING", 2)
    waiting.keep(rows(8, 8, 9, 9), 0, [True, True], 2)
    assert [row["row"] for row in waiting.waiting] == [8, 9]


def test_one_that_fails_each_time_is_given_up_and_one_that_is_paid_starts_anew():
    """Row 1 fails for ever, row 2 is paid when it comes back the second time; both are in the data again afterwards."""
    waiting = Reroll(0, 2, 2)
    waiting.keep(rows(1, 2), 0, [True, True], 1)
    asked = []
    for failed in ([True, True], [True, False]):
        taken = waiting.instead(rows(8, 9), 0, 2, 1)
        asked.append([row["row"] for row in taken])
        waiting.keep(taken, 0, failed, 1)
    assert asked == [[1, 2], [1, 2]]
    assert (waiting.waiting, waiting.given_up) == ([], 1)
    again = Reroll(0, 2, 2)
    again.load_state_dict(waiting.state_dict())
    again.keep(rows(1, 2), 0, [True, True], 1)  # as an epoch asks them
    assert again.waiting == rows(2)
    again.keep(rows(1), 0, [False], 1)
    again.keep(rows(1), 0, [True], 1)
    assert again.waiting == rows(2, 1)
    again.load_state_dict({"waiting": rows(5)})  # of an earlier version
    assert [row["row"] for row in again.instead(rows(8), 0, 1, 1)] == [5]


@pytest.mark.parametrize("size", [2, 4])
def test_processes_take_their_parts_of_what_comes_back(size):
    """Also of a group that begins on one and ends on the next."""
    parts = []
    for first in (0, 6):
        own = Reroll(0, 2, 4)
        own.waiting = rows(7, 8, 9)
        parts += own.instead(rows(*(first + place for place in range(6))), first, 12, size)
        assert [row["row"] for row in own.waiting] == [9]
    numbers = [row["row"] for row in parts]
    assert numbers == [*range(12 - 2 * size), *[7] * size, *[8] * size]


def test_a_group_failed_where_nothing_was_paid_and_none_told_apart():
    totals = torch.tensor([0.0, 0.0, -1.0, -1.0, 1.0, 1.0, 0.0, -1.0, torch.nan, torch.nan])
    alike = torch.tensor([True, True, True, False, True])
    assert failed_groups(totals, alike, 2) == [True, True, False, False, False]
