"""All rewards of a run as one matrix: built-in ones, Python functions and reward models, by answer and by reward.

The order is that of `method.reward_funcs`. What does not apply to a row is NaN here, as TRL has it; a reward that fails
in any way ends the run with one sentence. `dry_run` asks every reward before training what it says to the first rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from engine.config.reward_specs import RewardSpec, reward_specs
from engine.data.prompts import reward_columns
from engine.errors import WorkbenchError
from engine.rewards.functions import PLACE, RewardFunctions, named
from engine.rewards.models import RewardModel

DRY_ROWS = 4
COMPARING = ("exact_match", "gsm8k")
"""The built-in rewards that do not apply to a row without an answer of its own."""
MOST = 1e15
"""The largest reward with its weight: the squares that spreads are computed from must fit float32."""


class Made(Protocol):
    """What reward functions said of completions, by the reward's place; None where one does not apply."""

    @property
    def completions(self) -> list[Any]: ...

    @property
    def values(self) -> Mapping[int, list[float | None]]: ...


class Rewards:
    """The rewards of one config. `names` are what their curves are called, `weights` what they count."""

    def __init__(self, texts: Sequence[str], timeout: float, device: torch.device) -> None:
        """Raises BadReward for a text that names no reward; models are loaded by `start`."""
        self.specs = reward_specs(texts)
        self.names = [spec.name for spec in self.specs]
        self.weights = [spec.weight for spec in self.specs]
        self.device = device
        self.functions = RewardFunctions([spec for spec in self.specs if spec.kind != "model"], timeout)
        self._models: dict[str, RewardModel] = {}
        self.made: Made | None = None
        """What was said of the completions that are asked about now, ahead of that."""

    def start(self) -> None:
        """Loads functions and models. Raises WorkbenchError naming the one that cannot be."""
        self.functions.start()
        for spec in self.specs:
            if spec.kind == "model" and spec.name not in self._models:
                self._models[spec.name] = RewardModel(spec, self.device)

    def made_ahead(self, place: int, completions: Sequence[Any]) -> list[float] | None:
        """What the reward at this place said of these completions before they were asked about; None where it did not."""
        if self.made is None or self.made.completions != completions or place not in self.made.values:
            return None
        return [math.nan if value is None else value for value in self.made.values[place]]

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
        rows: Sequence[int],
    ) -> torch.Tensor:
        """Rewards in float32, shape (answers, rewards); NaN where one does not apply. `rows` are for messages."""
        places = range(len(self.specs))
        return torch.stack(
            [self.one(place, prompts, completions, completion_ids, columns, rows) for place in places], 1
        )

    def one(
        self,
        place: int,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
        rows: Sequence[int],
    ) -> torch.Tensor:
        """What the reward at this place says, in float32, shape (answers,). Raises WorkbenchError."""
        self.start()
        spec = self.specs[place]
        if spec.kind == "model":
            scores = torch.tensor(self._models[spec.name].score(prompts, completions), dtype=torch.float64)
            return _usable(spec, scores, torch.isnan(scores), rows)
        batch = {**columns, "prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        number = sum(other.kind != "model" for other in self.specs[:place])
        values = self.functions.score(number, batch, rows)
        scores = torch.tensor([torch.nan if value is None else value for value in values], dtype=torch.float64)
        return _usable(spec, scores, torch.zeros_like(scores, dtype=torch.bool), rows)

    def dry_run(self, dataset: Any, tokenizer: Any) -> torch.Tensor:
        """Every reward on the first rows, with their own answers and with empty ones, which a model gives too.

        Raises WorkbenchError for one that fails on them. Gives the rewards of the rows' own answers (answers, rewards), as far as
        rows have one.
        """
        self._compare_with_something(dataset)
        rows = [dataset[index] for index in range(min(DRY_ROWS, len(dataset)))] * 2
        prompts = [json.loads(row["prompt"]) for row in rows]
        columns = columns_of([reward_columns(row) for row in rows])
        given = columns.get("answer", [None] * len(rows))[: len(rows) // 2]
        answers = [str(answer or "") for answer in given] + [""] * len(given)
        completions = [
            answer if isinstance(prompt, str) else [{"role": "assistant", "content": answer}]
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        ids = [tokenizer(answer, add_special_tokens=False)["input_ids"] for answer in answers]
        scores = self.score(prompts, completions, ids, columns, [row["row"] for row in rows])
        return scores[[place for place, answer in enumerate(given) if answer is not None]]

    def _compare_with_something(self, dataset: Any) -> None:
        comparing = next((spec for spec in self.specs if spec.kind in COMPARING), None)
        if comparing is None or any(json.loads(row["columns"]).get("answer") is not None for row in dataset):
            return
        raise WorkbenchError(
            f"{PLACE}: {named(comparing)} compares with the row's answer, and the rows of data.train hold none.",
            "Name the column that holds it under data.train columns, as answer, or choose another reward.",
        )

    def interrupt(self) -> None:
        """Ends what a function is asked at the moment, by another thread: it raises WorkbenchError there."""
        self.functions.interrupt()

    def close(self) -> None:
        """Ends the process of the functions."""
        self.functions.close()


def _usable(spec: RewardSpec, scores: torch.Tensor, wrong: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """The rewards in float32. Raises WorkbenchError for the first that is wrong or too large to be compared there."""
    wrong = wrong | ((scores * spec.weight).abs() > MOST)
    if wrong.any():
        place = int(wrong.nonzero()[0])
        raise WorkbenchError(
            f"{PLACE}: {named(spec)} must give finite numbers of at most {MOST:g} with their weight; got "
            f"{scores[place].item():g} (row {rows[place]} of the data).",
            "Scale them down: only their differences within a batch count."
            if spec.kind != "model"
            else "Name a reward model whose scores are numbers in its own precision.",
        )
    return scores.float()


def columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Rows of columns as columns of rows; None where a row has not that column."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}
