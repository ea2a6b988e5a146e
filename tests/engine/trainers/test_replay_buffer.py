"""The heap of groups: what it keeps, what it draws how often, and that a copy of its state draws the same."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from engine.trainers.replay_buffer import FitsRun, ReplayBuffer, StoredGroup, spread

FITS = FitsRun(answers=2, prompt=4, answer=3, reference=False, reward_funcs=["length:4"])


def group(score, row=0, step=0, answers=(2, 3), **more):
    tokens = torch.arange(sum(answers), dtype=torch.int32)
    known = {
        "prompt_ids": torch.arange(4, dtype=torch.int32), "lengths": list(answers), "ids": tokens, "logps": -tokens.float(),
        "reference": None, "advantages": [1.0, -1.0], "counted": [True, True], "rewards": [[1.0], [0.0]],
        "images": [], "prompt": "", "answer": None,
    }  # fmt: skip
    return StoredGroup(row=row, step=step, score=score, **{**known, **more})


def test_it_is_bounded_and_keeps_the_highest_scores_and_of_equal_ones_the_newest():
    buffer = ReplayBuffer(3, 50, 0, FITS)
    for row, score in enumerate((0.5, 0.2, 0.5, 0.1, 0.5, 0.5)):
        buffer.add(group(score, row))
        assert len(buffer) <= 3
    assert sorted(each.row for each in buffer.groups) == [2, 4, 5]
    assert buffer.bytes == 3 * 4 * (4 + 5 + 5)  # a prompt's ids, the answers' and their log-probabilities


def test_what_would_be_kept_is_what_is_kept():
    draw = random.Random(0)
    for _ in range(50):
        buffer = ReplayBuffer(draw.randint(1, 4), 50, 0, FITS)
        for row in range(draw.randint(0, 5)):
            buffer.add(group(draw.choice((0.1, 0.2, 0.3)), -1 - row))
        scores = [draw.choice((0.1, 0.2, 0.3)) for _ in range(draw.randint(0, 5))]
        told = buffer.admitted(scores)
        for row in told:
            buffer.add(group(scores[row], row))
        assert sorted(each.row for each in buffer.groups if each.row >= 0) == told


def test_groups_are_drawn_in_the_shares_of_their_scores_and_never_twice_at_once():
    buffer = ReplayBuffer(3, 50, 0, FITS)
    for row, score in enumerate((1.0, 2.0, 5.0)):
        buffer.add(group(score, row))
    found = Counter(buffer.draw(1)[0].row for _ in range(4000))
    assert [found[row] / 4000 for row in range(3)] == pytest.approx([1 / 8, 2 / 8, 5 / 8], abs=0.03)
    assert sorted(each.row for each in buffer.draw(9)) == [0, 1, 2]
    assert ReplayBuffer(3, 50, 0, FITS).draw(2) == []


def test_old_groups_go():
    buffer = ReplayBuffer(3, 10, 0, FITS)
    buffer.add(group(9.0, 0, step=3))
    buffer.add(group(1.0, 1, step=4))
    buffer.drop_old(13)
    assert len(buffer) == 2
    buffer.drop_old(14)
    assert [each.row for each in buffer.groups] == [1]


def test_a_copy_of_its_state_draws_the_same_and_takes_what_fits_alone(tmp_path):
    buffer = ReplayBuffer(4, 50, 0, FITS)
    for row in range(6):
        buffer.add(group(1.0 + row % 3, row))
    buffer.draw(1)
    torch.save(buffer.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    copy = ReplayBuffer(4, 50, 1, FITS)
    copy.load_state_dict(state)
    assert [[each.row for each in one.draw(2)] for one in (copy,) * 9] == [
        [each.row for each in one.draw(2)] for one in (buffer,) * 9
    ]
    buffer.add(group(0.1, 7))
    copy.add(group(0.1, 7))
    assert sorted(each.row for each in copy.groups) == sorted(each.row for each in buffer.groups)
    for changed in (
        {"answers": 8},
        {"prompt": 3},  # a shorter prompt
        {"answer": 2},
        {"reference": True},  # of which it has nothing
        {"reward_funcs": ["length:5"]},  # which gave other advantages
    ):
        other = ReplayBuffer(4, 50, 1, replace(FITS, **changed))
        other.load_state_dict(state)
        assert len(other) == 0
    smaller = ReplayBuffer(2, 50, 0, FITS)
    smaller.load_state_dict(state)
    assert sorted(each.score for each in smaller.groups) == [3.0, 3.0]


def test_the_spread_is_that_of_each_column_within_its_group():
    columns = torch.tensor([[0.0, 1.0], [1.0, 1.0], [5.0, float("nan")], [5.0, 2.0]])
    assert spread(columns, 2).tolist() == pytest.approx([0.5**0.5, 0.0])
