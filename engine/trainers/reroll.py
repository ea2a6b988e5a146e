"""Prompts on which every answer failed, which come back in later samplings, when the model may know more.

A group failed where no answer was told apart and no reward paid: its sums are all 0 or less. Its prompt waits, once, in the
order in which prompts failed, and takes the place of a group at the end of a later sampling. One that comes back so often in vain
is given up: with a wrong reference answer it fails for ever, and each time another prompt is not asked. What waits is the same on
all processes and goes into each checkpoint, so that a resumed run asks the same prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import gather_object

WAITING = 1024
"""Prompts that wait at most; the oldest give way. Each goes into every checkpoint with its ids and columns."""


AGAIN = "again"
"""What marks a row that came back. Samplings may be asked for ahead, so that others begin before its answers are known."""


class Reroll:
    """The prompts that wait. `start` is the share of the run's steps behind which they come back, `most` how many groups of a
    sampling they take at most, `tries` how often one comes back at most."""

    def __init__(self, start: float, most: int, tries: int) -> None:
        self.start, self.most, self.tries = start, most, tries
        self.waiting: list[dict[str, Any]] = []
        self.tried: dict[int, int] = {}
        """How often a prompt came back and failed again, by its row; one that did not fail the last time has no entry."""

    @property
    def given_up(self) -> int:
        """How many prompts come back no more."""
        return sum(count >= self.tries for count in self.tried.values())

    def state_dict(self) -> dict[str, Any]:
        """Numbers, and rows as they are asked."""
        return {"waiting": self.waiting, "tried": self.tried}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up what was saved; earlier versions counted no tries."""
        self.waiting, self.tried = state["waiting"], state.get("tried", {})

    def is_due(self, step: int, steps: int) -> bool:
        """Whether prompts come back after so many of the run's steps."""
        return step >= self.start * steps

    def instead(self, rows: Sequence[dict[str, Any]], first: int, total: int, size: int) -> list[dict[str, Any]]:
        """These rows, of which the first is the answer `first` of `total` in groups of `size`, the last groups being asked
        prompts that waited; these wait no longer."""
        count = min(self.most, len(self.waiting), total // size)
        back, self.waiting = self.waiting[:count], self.waiting[count:]
        begin = total // size - count
        groups = [(first + place) // size for place in range(len(rows))]
        back = [{**row, AGAIN: True} for row in back]
        return [row if group < begin else back[group - begin] for row, group in zip(rows, groups, strict=True)]

    def keep(self, rows: Sequence[dict[str, Any]], first: int, failed: Sequence[bool], size: int) -> None:
        """Has the prompts of failed groups wait; every process says what it has of them. `failed` is of all groups."""
        if not any(failed) and not self.tried:
            return
        own = [
            (row, failed[place // size])
            for place, row in enumerate(rows, first)
            # a group may end on the next process
            if place % size == 0 and (failed[place // size] or row["row"] in self.tried)
        ]
        known = {row["row"] for row in self.waiting}
        for row, in_vain in gather_object(own):
            number = row["row"]
            if not in_vain:
                self.tried.pop(number, None)
                continue
            if AGAIN in row:
                self.tried[number] = self.tried.get(number, 0) + 1
            if number not in known and self.tried.get(number, 0) < self.tries:
                known.add(number)
                self.waiting.append({name: value for name, value in row.items() if name != AGAIN})
        self.waiting = self.waiting[-WAITING:]


def failed_groups(totals: torch.Tensor, alike: torch.Tensor, size: int) -> list[bool]:
    """Which groups failed. `totals` are the answers' sums of rewards, NaN where none applies, `alike` is of each group."""
    paid = (totals.view(-1, size) > 0).any(1)
    judged = (~totals.isnan()).view(-1, size).any(1)
    return (alike & judged & ~paid).tolist()
