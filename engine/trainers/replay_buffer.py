"""Groups of answers that taught something, kept to be trained on again: a bounded heap, drawn from by score.

A group's score is the mean size of its advantages times the spread of its rewards. The heap drops its lowest score first, and
of equal ones the oldest: with rewards of 0 and 1 most scores are equal, and a heap that kept what came first would never hold
anything new. All tensors lie in main memory, ids in four bytes and without padding.

The buffer is the same on all processes, and so is what it draws: its random numbers are its own, and go into checkpoints
with it, so that a resumed run replays the same groups.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch


@dataclass
class StoredGroup:
    """One group of G answers with T tokens in all, as it was sampled after `step` optimizer steps."""

    row: int
    step: int
    score: float
    prompt_ids: torch.Tensor
    """int32 (P,), without padding."""
    lengths: list[int]
    """Tokens of each answer; G of them, T in all."""
    ids: torch.Tensor
    """int32 (T,), the answers behind one another."""
    logps: torch.Tensor
    """float32 (T,), by the model that gave the answers."""
    reference: torch.Tensor | None
    """float32 (T,), by the reference; None where the run has none."""
    advantages: list[float]
    counted: list[bool]
    """Whether an answer is trained on; one that was cut off may not be."""
    rewards: list[list[float]]
    """Of each answer by each function; NaN where one does not apply."""
    images: list[str]
    prompt: str
    answer: str | None

    @cached_property
    def bytes(self) -> int:
        """What its tensors and texts take."""
        tensors = [self.prompt_ids, self.ids, self.logps, *([] if self.reference is None else [self.reference])]
        texts = (self.prompt, self.answer or "", *self.images)
        return sum(each.nbytes for each in tensors) + sum(len(text.encode("utf-8", "replace")) for text in texts)

    def of(self, which: int, of_tokens: torch.Tensor) -> torch.Tensor:
        """The part of `of_tokens` (T,) that is the answer `which`'s."""
        start = sum(self.lengths[:which])
        return of_tokens[start : start + self.lengths[which]]


class ReplayBuffer:
    """At most `size` groups, each at most `max_age` optimizer steps old; `seed` begins its random numbers, `fits` is what the run
    can train on."""

    def __init__(self, size: int, max_age: int, seed: int, fits: FitsRun) -> None:
        self.size, self.max_age, self.fits = size, max_age, fits
        self._heap: list[tuple[float, int, StoredGroup]] = []
        self._number = 0
        """Of the next group: it tells equal scores apart."""
        self._generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def groups(self) -> list[StoredGroup]:
        """All of them, in no order."""
        return [group for _, _, group in self._heap]

    @property
    def bytes(self) -> int:
        """What all of them take."""
        return sum(group.bytes for group in self.groups)

    def drop_old(self, step: int) -> None:
        """Leaves out groups that are too old after `step` optimizer steps."""
        young = [entry for entry in self._heap if step - entry[2].step <= self.max_age]
        if len(young) < len(self._heap):
            self._heap = young
            heapq.heapify(self._heap)

    def draw(self, count: int) -> list[StoredGroup]:
        """At most `count` different groups, each next one by its share of the scores that are left."""
        count = min(count, len(self._heap))
        if not count:
            return []
        groups = [entry[2] for entry in sorted(self._heap, key=lambda entry: entry[1])]
        scores = torch.tensor([group.score for group in groups], dtype=torch.float64)
        found = torch.multinomial(scores, count, replacement=False, generator=self._generator).tolist()
        return [groups[place] for place in found]

    def admitted(self, scores: Sequence[float]) -> list[int]:
        """Which of new groups with these scores would be kept, by place."""
        old = [(score, number, -1) for score, number, _ in self._heap]
        new = [(score, self._number + place, place) for place, score in enumerate(scores)]
        return sorted(place for _, _, place in heapq.nlargest(self.size, old + new) if place >= 0)

    def add(self, group: StoredGroup) -> None:
        """Keeps a group, in place of the lowest score where the buffer is full."""
        entry = (group.score, self._number, group)
        self._number += 1
        if len(self._heap) < self.size:
            heapq.heappush(self._heap, entry)
        else:
            heapq.heappushpop(self._heap, entry)

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and texts."""
        names = [field.name for field in fields(StoredGroup)]
        heap = [(score, number, {name: getattr(group, name) for name in names}) for score, number, group in self._heap]
        own = {"reward_funcs": self.fits.reward_funcs, "generator": self._generator.get_state()}
        return {"heap": heap, "number": self._number, **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up what was saved: groups that this run can train on, the highest scores where it keeps fewer; none where other
        rewards gave the advantages."""
        if state["reward_funcs"] != self.fits.reward_funcs:
            return
        heap = [(score, number, StoredGroup(**group)) for score, number, group in state["heap"]]
        self._heap = heapq.nlargest(self.size, [entry for entry in heap if self.fits.holds(entry[2])])
        heapq.heapify(self._heap)
        self._number = state["number"]
        self._generator.set_state(state["generator"])


@dataclass(frozen=True)
class FitsRun:
    """What a stored group must have to be trained on in a run, whose settings may have changed before a resume."""

    answers: int
    prompt: int
    """Tokens of the longest prompt, and of the longest answer."""
    answer: int
    reference: bool
    """Whether answers are held to one."""
    reward_funcs: list[str]

    def holds(self, group: StoredGroup) -> bool:
        """Whether it has as many answers, none too long, and what the reference says of them where that is asked."""
        return (
            len(group.lengths) == self.answers
            and (group.reference is not None or not self.reference)
            and len(group.prompt_ids) <= self.prompt
            and max(group.lengths) <= self.answer
        )


def spread(columns: torch.Tensor, size: int) -> torch.Tensor:
    """Of each group of `size` rows the standard deviation of each column within it, summed over columns: float (groups,).
    `columns` is (answers, columns); NaN, where there is none, is left out."""
    groups = columns.double().view(-1, size, columns.shape[-1])
    there = ~groups.isnan()
    count = there.sum(1)
    mean = groups.nansum(1) / count.clamp(min=1)
    squares = ((groups - mean[:, None]) ** 2).nansum(1)
    return (squares / (count - 1).clamp(min=1)).sqrt().sum(1)
