"""A rehearsal is the run's own worker on the longest rows: every method gets through it, and it leaves no checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from engine.config.files import as_yaml
from engine.facts.counts import rehearsed_steps, steps_a_sampling
from engine.rehearse import Measuring
from engine.rules import read
from engine.run.store import RunFolder, create
from tests.engine.trainers.conftest import BASE, CONVERSATIONS, PAIRS, RATED, STEPS, TAUGHT, TEXTS, lines
from tests.engine.trainers.test_grpo import GRPO
from tests.engine.trainers.test_ppo import PPO

PLAIN = [{"text": "one two " * (3 + number)} for number in range(12)]
CASES: list[Any] = [
    pytest.param("sft", CONVERSATIONS, {}, marks=pytest.mark.slow),
    ("sft", CONVERSATIONS, {"adapter.kind": "lora", "memory.gradient_checkpointing": True}),
    ("sft", CONVERSATIONS, {"data.packing": True}),
    ("sft", CONVERSATIONS, {"memory.activation_offloading": "disk"}),
    pytest.param("pretrain", PLAIN, {"data.packing": True}, marks=pytest.mark.slow),
    ("dpo", PAIRS, {"method.kind": "dpo"}),
    ("dpo", PAIRS, {"method.kind": "dpo", "method.reference": "precompute"}),
    ("kto", RATED, {"method.kind": "kto"}),
    pytest.param("ipo", PAIRS, {}, marks=pytest.mark.slow),
    pytest.param("simpo", PAIRS, {}, marks=pytest.mark.slow),
    pytest.param("orpo", PAIRS, {}, marks=pytest.mark.slow),
    pytest.param("reward", PAIRS, {}, marks=pytest.mark.slow),
    pytest.param("prm", STEPS, {}, marks=pytest.mark.slow),
    ("embedding", TEXTS, {}),
    pytest.param("distill", TAUGHT, {}, marks=pytest.mark.slow),
    ("grpo", CONVERSATIONS, GRPO),
    ("ppo", CONVERSATIONS, PPO),
    pytest.param("ppo", CONVERSATIONS, {**PPO, "method.steps_per_generation": 10}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "rows", "settings"), CASES)
def test_every_method_is_rehearsed_by_its_own_trainer(
    kind: str,
    rows: list[Any],
    settings: dict[str, Any],
    tmp_path: Path,
    source: Callable[[list[Any]], str],
    train: Callable[..., RunFolder],
) -> None:
    mapping: dict[str, Any] = {"version": 1}
    written = BASE | settings | {"method.kind": kind, "data.train": [{"path": source(rows)}], "optim.max_steps": 2}
    for path, value in written.items():
        section, name = path.split(".", 1)
        mapping.setdefault(section, {})[name] = value
    folder = create(tmp_path / "runs", as_yaml(mapping), {"rehearse": True})
    run = train(folder=folder)
    (told,) = lines(run, "rehearsed")
    count = 2 * written["optim.per_device_train_batch_size"]
    assert told["rows"] == count
    assert told["memory_peak"] >= told["memory_before"] > 0
    assert told["seconds"] > 0
    assert 0 < told["longest"] <= told["tokens"] <= count * told["longest"]
    assert not list(run.checkpoints.glob("checkpoint-*"))
    assert [event["step"] for event in lines(run, "metrics")] == [1, 2]


def dataset(**columns: list[Any]) -> Dataset:
    return Dataset.from_dict(columns)


def test_the_longest_rows_come_first_and_once_for_each_step() -> None:
    rows = dataset(input_ids=[[1] * size for size in (3, 9, 4, 7)], row=[0, 1, 2, 3])
    chosen = Measuring(rows, 2)
    assert chosen.dataset["row"][:] == [1, 3, 1, 3]
    assert chosen.result()["longest"] == 9
    assert chosen.result()["tokens"] == 16


def test_few_rows_come_round_again() -> None:
    assert Measuring(dataset(input_ids=[[1], [1, 2]], row=[0, 1]), 3).dataset["row"][:] == [1, 0, 1, 1, 0, 1]


@pytest.mark.parametrize(
    ("seconds", "cycle", "told"),
    [((9.0, 2.0), 1, 2.0), ((9.0, 1.0, 1.0, 1.0, 5.0), 4, 2.0), ((9.0, 1.0, 1.0), 8, 2.0), ((0.5, 1.0), 8, 1.0)],
    ids=["every step samples", "the last of a cycle samples", "the first stands for it", "a first that was quick"],
)
def test_sampling_has_its_share_in_the_time_of_a_step(monkeypatch, seconds, cycle, told) -> None:
    clock = iter([moment for took in seconds for moment in (10.0, 10.0 + took)])
    monkeypatch.setattr("engine.rehearse._now", lambda: next(clock))
    measuring = Measuring(dataset(input_ids=[[1]]), 1, cycle=cycle)
    for _ in seconds:
        measuring.on_step_begin()
        measuring.on_step_end()
    assert measuring.result()["seconds"] == told


def test_a_rehearsal_of_ppo_makes_as_many_steps_as_a_sampling_serves_and_tells_their_mean(
    tmp_path, source, train, monkeypatch
) -> None:
    took, ends = [], Measuring.on_step_end

    def on_step_end(self: Measuring, *args: Any, **kwargs: Any) -> None:
        ends(self, *args, **kwargs)
        took[:] = self._seconds

    monkeypatch.setattr(Measuring, "on_step_end", on_step_end)
    mapping: dict[str, Any] = {"version": 1}
    settings = {**BASE, **PPO, "data.train": [{"path": source(CONVERSATIONS)}], "method.num_iterations": 3}
    for path, value in settings.items():
        section, name = path.split(".", 1)
        mapping.setdefault(section, {})[name] = value
    config = read(mapping).config
    assert (steps_a_sampling(config), rehearsed_steps(config)) == (3, 4)
    mapping["optim"]["max_steps"] = rehearsed_steps(config)
    run = train(folder=create(tmp_path / "runs", as_yaml(mapping), {"rehearse": True}))
    steps = [event["step_seconds"] for event in lines(run, "metrics")]
    (told,) = lines(run, "rehearsed")
    assert len(steps) == 4
    # Two clocks of one run, which a busy machine may stop between them.
    assert told["seconds"] == pytest.approx(sum(steps[1:]) / 3, rel=0.5)
    assert told["seconds"] == pytest.approx(sum(took[1:]) / 3, abs=1e-4)


def test_a_pair_is_as_long_as_its_prompt_with_the_longer_answer() -> None:
    rows = dataset(
        prompt_ids=[[1] * 5, [1] * 4], chosen_ids=[[1] * 2, [1] * 2], rejected_ids=[[1], [1] * 9], row=[0, 1]
    )
    assert Measuring(rows, 1).result()["longest"] == 13


def test_rows_of_both_verdicts_are_there_whatever_their_length() -> None:
    rows = dataset(
        prompt_ids=[[1]] * 4, completion_ids=[[1] * size for size in (9, 8, 7, 2)], label=[True, True, True, False]
    )
    assert set(Measuring(rows, 2).dataset["label"]) == {True, False}
